//! Attention on the CPU beside a plain read of the same memory: `cargo bench --bench attention`.
//!
//! Each argument is a shape `dtype,sequences,context,queries`; without one, a list of them is measured. Threads:
//! `KVFOLIO_NUM_THREADS`; instructions: `KVFOLIO_CPU_CAPABILITY`. Times are the least of the runs, of the clock and of
//! the calling thread's CPU time (on one thread the second is the one that a busy machine does not spoil).

use std::hint::black_box;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use kvfolio::kernels::{Element, PagedView, Scoring, Step, TokenView, attend, num_threads, read};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const PAGE: usize = 16;

const SHAPES: [&str; 12] = [
    "bf16,1,128,1",
    "bf16,1,2048,1",
    "bf16,8,2048,1",
    "bf16,8,8192,1",
    "f16,8,2048,1",
    "f32,1,128,1",
    "f32,8,2048,1",
    "bf16,1,512,512",
    "bf16,1,2048,2048",
    "f16,1,2048,2048",
    "f32,1,512,512",
    "f32,1,2048,2048",
];

fn main() {
    let shapes: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let shapes = if shapes.is_empty() { SHAPES.map(String::from).to_vec() } else { shapes };
    println!("{HEADS} query / {KV_HEADS} KV heads x {DIM}, page {PAGE}, {} threads", num_threads());
    for shape in shapes {
        let (dtype, numbers) = shape.split_once(',').expect("dtype,sequences,context,queries");
        let numbers: Vec<usize> = numbers.split(',').map(|x| x.parse().expect("a number")).collect();
        let &[sequences, context, queries] = numbers.as_slice() else { panic!("{shape}: three numbers") };
        match dtype {
            "f32" => measure::<f32>(&shape, sequences, context, queries),
            "f16" => measure::<f16>(&shape, sequences, context, queries),
            "bf16" => measure::<bf16>(&shape, sequences, context, queries),
            _ => panic!("{dtype}: f32, f16 or bf16"),
        }
    }
}

fn measure<E: Element>(name: &str, sequences: usize, context: usize, queries: usize) {
    let blocks = context.div_ceil(PAGE);
    let shape = [sequences * blocks + 1, PAGE, KV_HEADS, DIM];
    let size = shape.iter().product();
    let mut numbers = Numbers(1);
    let some: Vec<E> = (0..65_521).map(|_| E::from_f32(numbers.next())).collect();
    let fill = |size: usize| -> Vec<E> { some.iter().copied().cycle().take(size).collect() };
    let (keys, values, q) = (fill(size), fill(size), fill(sequences * queries * HEADS * DIM));
    let mut out = q.clone();
    let mut ids: Vec<i32> = (1..shape[0] as i32).collect();
    for i in (1..ids.len()).rev() {
        ids.swap(i, numbers.below(i + 1));
    }
    if std::env::var("SAME").is_ok() {
        ids.fill(1);
    }
    let tables: Vec<&[i32]> = ids.chunks_exact(blocks).collect();
    let lengths = vec![context as i32; sequences];
    let starts: Vec<i32> = (0..=sequences).map(|i| (i * queries) as i32).collect();
    let step = Step { block_table: &tables, seq_lens: &lengths, query_start_loc: &starts };
    let scale = 1.0 / (DIM as f32).sqrt();
    let scoring =
        Scoring { scale, sliding_window: None, logit_softcap: None, alibi_slopes: None, sinks: None };
    let q = TokenView::new(&q, [sequences * queries, HEADS, DIM]);
    let views = (PagedView::new(&keys, shape), PagedView::new(&values, shape));
    let (time, cpu) = least(|| {
        attend(&q, &views.0, &views.1, &step, &scoring, &mut out, None).expect("good arguments");
    });
    let bytes = (2 * size_of::<E>() * size) as f64;
    if queries > 1 {
        let products =
            4.0 * (sequences * HEADS * DIM) as f64 * (queries * (2 * context - queries + 1) / 2) as f64;
        println!(
            "{name:20} {:9.3} ms (cpu {:9.3}) {:7.1} GFLOP/s",
            time * 1e3,
            cpu * 1e3,
            products / cpu / 1e9
        );
        return;
    }
    let (plain, _) = least(|| {
        black_box(read(&[bytes_of(&keys), bytes_of(&values)]));
    });
    println!(
        "{name:20} {:9.3} ms (cpu {:9.3}) {:6.1} GB/s, {:3.0}% of a plain read's {:.1}",
        time * 1e3,
        cpu * 1e3,
        bytes / time / 1e9,
        100.0 * plain / time,
        bytes / plain / 1e9
    );
}

fn bytes_of<E: Element>(data: &[E]) -> &[u8] {
    // SAFETY: elements are plain numbers, and their bytes may be read.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

/// The least wall and CPU time, in seconds.
fn least(mut work: impl FnMut()) -> (f64, f64) {
    work();
    let (mut best, mut best_cpu) = (f64::INFINITY, f64::INFINITY);
    let (start, mut runs) = (Instant::now(), 0);
    while runs < 3 || (start.elapsed() < Duration::from_millis(700) && runs < 1000) {
        let (before, cpu) = (Instant::now(), cpu_time());
        work();
        best = best.min(before.elapsed().as_secs_f64());
        best_cpu = best_cpu.min(cpu_time() - cpu);
        runs += 1;
    }
    (best, best_cpu)
}

/// Of this thread, in seconds; NaN where the system does not tell.
fn cpu_time() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).map_or(f64::NAN, |ns| ns * 1e-9)
}

/// Numbers between -2 and 2, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn step(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn next(&mut self) -> f32 {
        self.step() as f32 / (1u64 << 29) as f32 - 2.0
    }

    fn below(&mut self, limit: usize) -> usize {
        self.step() as usize % limit
    }
}
