//! Attention over paged K and V: the arguments and their checks.

use super::element::Element;
use super::error::{KernelError, check_size};
use super::job::{Arithmetic, Job};
use super::output::Output;
use super::schedule::{Schedule, Sizes};
use super::scratch::{with_partial, with_scratch};
use super::threads;
use super::view::{PagedView, TokenView};

/// Multiplications of a call, times bytes of an element, below which waking another thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 20;

/// Who attends to what, as a plan tells it.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// Physical blocks of each row. Cells behind the row's length, and before what its queries see, are not read.
    pub block_table: &'a [&'a [i32]],
    /// KV length of each row, this step's tokens included. 0: its queries see nothing.
    pub seq_lens: &'a [i32],
    /// Row `r` has the queries `query_start_loc[r]..query_start_loc[r + 1]`; the last of them stands at its last position.
    pub query_start_loc: &'a [i32],
}

/// How scores come of products.
#[derive(Debug, Clone, Copy)]
pub struct Scoring<'a> {
    /// Factor of `q . k`.
    pub scale: f32,
    /// So many keys are seen, the query's own position included. `None`: all.
    pub sliding_window: Option<usize>,
    /// `cap * tanh(score / cap)`, before the bias.
    pub logit_softcap: Option<f32>,
    /// `slope * (key position - query position)` is added to the scores of each head.
    pub alibi_slopes: Option<&'a [f32]>,
    /// A score of each head that joins the denominator and has no value.
    pub sinks: Option<&'a [f32]>,
}

/// Causal attention of `q`, `[tokens, num_heads, head_dim]`, to the K and V that a step's block table names.
///
/// Writes `out`, dense and of q's shape, and `lse`, `[tokens, num_heads]`: the natural logarithm of the softmax's
/// denominator, sinks included. Query head `h` reads KV head `h / (num_heads / num_kv_heads)`. Sums are in f32.
///
/// Softmax is taken online, a chunk of keys at a time (Milakov and Gimelshein 2018; `FlashAttention`, Dao et al.
/// 2022), reading K and V where they lie in their pages (`PagedAttention`, Kwon et al., SOSP 2023). No position that
/// a query does not see has any influence, whatever its memory holds.
pub fn attend<E: Element>(
    q: &TokenView<'_, E>,
    keys: &PagedView<'_, E>,
    values: &PagedView<'_, E>,
    step: &Step<'_>,
    scoring: &Scoring<'_>,
    out: &mut [E],
    lse: Option<&mut [f32]>,
) -> Result<(), KernelError> {
    attend_with(Arithmetic::best(), q, keys, values, step, scoring, out, lse)
}

/// As [`attend`], with a choice of instructions.
#[expect(clippy::too_many_arguments, reason = "those of `attend` and one more")]
pub(crate) fn attend_with<E: Element>(
    arithmetic: Arithmetic,
    q: &TokenView<'_, E>,
    keys: &PagedView<'_, E>,
    values: &PagedView<'_, E>,
    step: &Step<'_>,
    scoring: &Scoring<'_>,
    out: &mut [E],
    lse: Option<&mut [f32]>,
) -> Result<(), KernelError> {
    check_shapes(q, keys, values, out, lse.as_deref())?;
    check_scoring(q.shape()[1], scoring)?;
    check_step(q.shape()[0], keys, step, scoring)?;
    let [_, num_heads, head_dim] = q.shape();
    let [_, block_size, num_kv_heads, _] = keys.shape();
    let pairs = (0..step.seq_lens.len()).map(|row| {
        let queries = (step.query_start_loc[row + 1] - step.query_start_loc[row]) as usize;
        queries.saturating_mul(step.seq_lens[row] as usize)
    });
    let work = pairs.fold(0, usize::saturating_add).saturating_mul(num_heads * head_dim);
    let share = work.saturating_mul(size_of::<E>()) >= WORTH_SHARING;
    let threads = if share { threads::count() } else { 1 };
    let sizes = Sizes { block_size, num_kv_heads, head_dim, group: num_heads / num_kv_heads, threads };
    let Schedule { queries, tiles, merges, parts, partials } =
        &Schedule::new(step, scoring.sliding_window, &sizes);
    with_partial(partials * num_heads * Output::<E>::partial_width(head_dim), |partial| {
        let output = &Output::new(out, lse, [num_heads, head_dim], partial);
        let job = Job { q, keys, values, step, scoring, group: sizes.group, queries, output };
        threads::for_each(tiles.len(), share, |item| {
            with_scratch(|scratch| arithmetic.run(&job, &tiles[item], scratch));
        });
        threads::for_each(merges.len(), share, |item| {
            let (token, range) = &merges[item];
            arithmetic.merge(&job, *token, &parts[range.clone()]);
        });
    });
    Ok(())
}

fn check_shapes<E: Element>(
    q: &TokenView<'_, E>,
    keys: &PagedView<'_, E>,
    values: &PagedView<'_, E>,
    out: &[E],
    lse: Option<&[f32]>,
) -> Result<(), KernelError> {
    let [tokens, num_heads, head_dim] = q.shape();
    let [num_blocks, block_size, num_kv_heads, key_dim] = keys.shape();
    check_size("values", "number of blocks", num_blocks, values.shape()[0])?;
    check_size("values", "block_size", block_size, values.shape()[1])?;
    check_size("values", "num_kv_heads", num_kv_heads, values.shape()[2])?;
    check_size("values", "head_dim", key_dim, values.shape()[3])?;
    check_size("keys", "block_size", block_size.max(1), block_size)?;
    check_size("keys", "num_kv_heads", num_kv_heads.max(1), num_kv_heads)?;
    check_size("q", "head_dim", key_dim, head_dim)?;
    if num_heads == 0 || num_heads % num_kv_heads != 0 {
        return Err(KernelError::HeadGroups { num_heads, num_kv_heads });
    }
    check_size("out", "number of elements", tokens * num_heads * head_dim, out.len())?;
    lse.map_or(Ok(()), |lse| check_size("lse", "number of elements", tokens * num_heads, lse.len()))
}

fn check_scoring(num_heads: usize, scoring: &Scoring<'_>) -> Result<(), KernelError> {
    let check = |argument, allowed, found: f32, good: bool| {
        if good { Ok(()) } else { Err(KernelError::Parameter { argument, allowed, found: f64::from(found) }) }
    };
    check("scale", "finite", scoring.scale, scoring.scale.is_finite())?;
    if scoring.sliding_window == Some(0) {
        check("sliding_window", "at least 1 (the query's own position)", 0.0, false)?;
    }
    if let Some(cap) = scoring.logit_softcap {
        check("logit_softcap", "finite and above 0", cap, cap.is_finite() && cap > 0.0)?;
    }
    if let Some(slopes) = scoring.alibi_slopes {
        check_size("alibi_slopes", "num_heads", num_heads, slopes.len())?;
        slopes.iter().try_for_each(|&slope| check("alibi_slopes", "finite", slope, slope.is_finite()))?;
    }
    if let Some(sinks) = scoring.sinks {
        check_size("sinks", "num_heads", num_heads, sinks.len())?;
        let good = |sink: f32| sink < f32::INFINITY; // minus infinity is no sink, NaN is nothing
        sinks.iter().try_for_each(|&sink| check("sinks", "numbers below infinity", sink, good(sink)))?;
    }
    Ok(())
}

fn check_step<E: Element>(
    tokens: usize,
    keys: &PagedView<'_, E>,
    step: &Step<'_>,
    scoring: &Scoring<'_>,
) -> Result<(), KernelError> {
    let rows = step.seq_lens.len();
    check_size("block_table", "number of rows", rows, step.block_table.len())?;
    check_size("query_start_loc", "length", rows + 1, step.query_start_loc.len())?;
    let starts = step.query_start_loc;
    let wrong =
        |index: usize, allowed: String| KernelError::QueryStart { index, allowed, found: starts[index] };
    if starts[0] != 0 {
        return Err(wrong(0, "0".into()));
    }
    if let Some(index) = (1..=rows).find(|&index| starts[index] < starts[index - 1]) {
        return Err(wrong(index, format!("at least {} (where the row begins)", starts[index - 1])));
    }
    if starts[rows] as usize != tokens {
        return Err(wrong(rows, format!("{tokens} (the tokens of q)")));
    }
    for row in 0..rows {
        check_row(row, (starts[row + 1] - starts[row]) as usize, keys, step, scoring)?;
    }
    Ok(())
}

/// Holds one row's length and its visible blocks against the storage.
fn check_row<E: Element>(
    row: usize,
    queries: usize,
    keys: &PagedView<'_, E>,
    step: &Step<'_>,
    scoring: &Scoring<'_>,
) -> Result<(), KernelError> {
    let [num_blocks, block_size, ..] = keys.shape();
    let (table, found) = (step.block_table[row], step.seq_lens[row]);
    let maximum = table.len().saturating_mul(block_size);
    let length = usize::try_from(found).ok().filter(|&length| length <= maximum);
    let length = length.filter(|&length| length == 0 || length >= queries);
    let length = length.ok_or(KernelError::SequenceLength { row, minimum: queries, maximum, found })?;
    if queries == 0 || length == 0 {
        return Ok(());
    }
    let first_position = length - queries;
    let first_visible =
        scoring.sliding_window.map_or(0, |window| (first_position + 1).saturating_sub(window));
    let visible = first_visible / block_size..length.div_ceil(block_size);
    let first = visible.start;
    for (index, &found) in table[visible].iter().enumerate() {
        let index = first + index;
        if found == 0 {
            let start = index * block_size;
            return Err(KernelError::Discarded {
                row,
                index,
                start,
                stop: start + block_size - 1,
                first_visible,
            });
        }
        if found < 0 || found as usize >= num_blocks {
            return Err(KernelError::Block { row, index, maximum: num_blocks.saturating_sub(1), found });
        }
    }
    Ok(())
}
