//! What any CPU can do; compilers turn most of it into the vectors that the target always has.
#![expect(clippy::inline_always, reason = "as in the trait's module")]

use half::{bf16, f16};

use super::Simd;

/// Arrays of eight.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

const PORTABLE_LANES: usize = 8;

macro_rules! lanewise {
    ($($name:ident($($arg:ident),*) = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: Self::V),*) -> Self::V {
            std::array::from_fn(|lane| {
                $(let $arg = $arg[lane];)*
                $body
            })
        }
    )*};
}

impl Simd for Portable {
    type V = [f32; PORTABLE_LANES];
    const LANES: usize = PORTABLE_LANES;
    const ROWS: usize = 2;
    const BLOCK: usize = 4;

    lanewise! {
        add(a, b) = a + b;
        sub(a, b) = a - b;
        mul(a, b) = a * b;
        div(a, b) = a / b;
        fma(a, b, c) = a * b + c; // a fused one is a call into the C library on most baselines
        max(a, b) = if a > b { a } else { b };
        min(a, b) = if a < b { a } else { b };
        round(x) = (x + 12_582_912.0) - 12_582_912.0; // 1.5 * 2^23: no fraction bits are left
        scale_by_power(x, n) = x * f32::from_bits(((n as i32 + 127) << 23) as u32);
        select_less(a, b, x, y) = if a < b { x } else { y };
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; PORTABLE_LANES]
    }

    #[inline(always)]
    fn sum_each(self, vectors: [Self::V; 4]) -> [f32; 4] {
        vectors.map(|v| ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])))
    }

    #[inline(always)]
    fn iota(self) -> Self::V {
        std::array::from_fn(|lane| lane as f32)
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::V {
        // SAFETY: the caller's promise; an array needs no more alignment than its elements.
        unsafe { from.cast::<Self::V>().read() }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> Self::V {
        // SAFETY: as in `load`.
        unsafe { from.cast::<[f16; PORTABLE_LANES]>().read() }.map(f16::to_f32)
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> Self::V {
        // SAFETY: as in `load`.
        unsafe { from.cast::<[bf16; PORTABLE_LANES]>().read() }
            .map(|x| f32::from_bits(u32::from(x.to_bits()) << 16))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: Self::V) {
        // SAFETY: as in `load`.
        unsafe { to.cast::<Self::V>().write(x) };
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16, x: Self::V) {
        // SAFETY: as in `load`.
        unsafe { to.cast::<[f16; PORTABLE_LANES]>().write(x.map(f16::from_f32)) };
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, x: Self::V) {
        // SAFETY: as in `load`.
        unsafe { to.cast::<[bf16; PORTABLE_LANES]>().write(x.map(bf16::from_f32)) };
    }

    #[inline(always)]
    fn prefetch(self, _address: *const u8) {}
}
