//! Vectors of f32, one implementation for each instruction set, so that the attention kernel is written once.
//!
//! A value of a type that implements [`Simd`] is a proof that the CPU has the instructions: it comes from
//! `detect` only, and so the arithmetic is safe to call. All of it must be inlined into a function with the
//! matching `#[target_feature]`, which [`super::tile`] sees to.
#![expect(
    clippy::inline_always,
    reason = "an intrinsic becomes an instruction only inside a #[target_feature] function"
)]

use half::{bf16, f16};

use super::element::{Element, Format};

/// The most lanes of any implementation; buffers are padded to a multiple of it.
pub(crate) const MAX_LANES: usize = 16;

/// `LANES` numbers at once.
pub(crate) trait Simd: Copy + Send + Sync {
    type V: Copy;
    const LANES: usize;
    /// So many query rows, times four vectors, are accumulated without spilling registers.
    const ROWS: usize;

    fn splat(self, x: f32) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the CPU can.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger one; `b` if either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller one; `b` if either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// To the nearest integer; for magnitudes below 2^22.
    fn round(self, x: Self::V) -> Self::V;
    /// `x * 2^n`, for integers -126 <= n <= 127.
    fn scale_by_power(self, x: Self::V, n: Self::V) -> Self::V;
    /// `a < b ? x : y` in each lane.
    fn select_less(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// The sum over the lanes of each.
    fn sum_each(self, vectors: [Self::V; 4]) -> [f32; 4];
    /// 0, 1, ... `LANES - 1`.
    fn iota(self) -> Self::V;

    /// # Safety
    /// `LANES` numbers must be readable.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// # Safety
    /// `LANES` numbers must be readable.
    unsafe fn load_f16(self, from: *const f16) -> Self::V;
    /// # Safety
    /// `LANES` numbers must be readable.
    unsafe fn load_bf16(self, from: *const bf16) -> Self::V;
    /// # Safety
    /// `LANES` numbers must be writable.
    unsafe fn store(self, to: *mut f32, x: Self::V);
    /// Asks for the cache line at an address, which need not be valid.
    fn prefetch(self, address: *const u8);

    /// The numbers of a storage type, widened.
    ///
    /// # Safety
    /// `LANES` elements must be readable.
    #[inline(always)]
    unsafe fn load_elements<E: Element>(self, from: *const E) -> Self::V {
        // SAFETY: the caller's promise; `FORMAT` tells what the elements are, so the casts change nothing.
        unsafe {
            match E::FORMAT {
                Format::F32 => self.load(from.cast()),
                Format::F16 => self.load_f16(from.cast()),
                Format::Bf16 => self.load_bf16(from.cast()),
            }
        }
    }

    /// The first `count` numbers of a storage type, widened, then zeros.
    ///
    /// # Safety
    /// `count` elements must be readable, and `count` at most `LANES`.
    #[inline(always)]
    unsafe fn load_some<E: Element>(self, from: *const E, count: usize) -> Self::V {
        let mut buffer = [E::default(); MAX_LANES];
        debug_assert!(count <= Self::LANES);
        // SAFETY: the caller's promise; the buffer has room for MAX_LANES >= LANES >= count elements.
        unsafe {
            from.copy_to_nonoverlapping(buffer.as_mut_ptr(), count);
            self.load_elements(buffer.as_ptr())
        }
    }

    /// The largest lane.
    #[inline(always)]
    fn max_lane(self, x: Self::V) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; MAX_LANES];
        // SAFETY: the buffer has room for MAX_LANES >= LANES numbers.
        unsafe { self.store(lanes.as_mut_ptr(), x) };
        let mut width = MAX_LANES / 2;
        while width > 0 {
            for lane in 0..width {
                lanes[lane] =
                    if lanes[lane] > lanes[lane + width] { lanes[lane] } else { lanes[lane + width] };
            }
            width /= 2;
        }
        lanes[0]
    }

    /// e^x to about one unit in the last place for x <= 88; 0 below -87.
    ///
    /// Range reduction after Cody and Waite, polynomial from the Cephes library's `expf`.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        let floor = self.splat(-87.0);
        let bounded = self.max(floor, x); // a NaN stays one
        let n = self.round(self.mul(bounded, self.splat(std::f32::consts::LOG2_E)));
        let f = self.fma(n, self.splat(-0.693_359_4), bounded); // ln 2 to 9 bits, so that the product is exact
        let f = self.fma(n, self.splat(2.121_944_4e-4), f); // and the rest of it
        let mut p = self.splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = self.fma(p, f, self.splat(c));
        }
        let p = self.add(self.fma(p, self.mul(f, f), f), self.splat(1.0));
        self.select_less(x, floor, self.splat(0.0), self.scale_by_power(p, n))
    }

    /// tanh x to a few units in the last place, for small x, too; from the Cephes library's `tanhf`.
    #[inline(always)]
    fn tanh(self, x: Self::V) -> Self::V {
        let zero = self.splat(0.0);
        let negated = self.sub(zero, x);
        let magnitude = self.max(negated, x);
        // 1 - 2 / (e^2x + 1), which is 1 to the last bit from 9.01 on
        let bounded = self.min(self.splat(10.0), magnitude);
        let grown = self.exp(self.add(bounded, bounded));
        let one = self.splat(1.0);
        let large = self.sub(one, self.div(self.splat(2.0), self.add(grown, one)));
        let large = self.select_less(x, zero, self.sub(zero, large), large);
        let z = self.mul(x, x);
        let mut p = self.splat(-5.704_988_7e-3);
        for c in [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1] {
            p = self.fma(p, z, self.splat(c));
        }
        let small = self.fma(self.mul(p, z), x, x);
        self.select_less(magnitude, self.splat(0.625), small, large)
    }
}

/// What any CPU can do; compilers turn most of it into the vectors that the target always has.
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
    fn prefetch(self, _address: *const u8) {}
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    // Clippy lets tests import by wildcard, so there the expectation would not be met.
    #[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the prefix names them"))]
    use std::arch::x86_64::*;

    use half::{bf16, f16};

    use super::Simd;

    /// AVX2 with FMA and F16C: Haswell and Zen, and what came after.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(());

    impl Avx2 {
        pub(crate) fn detect() -> Option<Self> {
            let found = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            found.then_some(Self(()))
        }
    }

    /// AVX-512 F and DQ: Skylake-SP and Zen 4, and what came after.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(());

    impl Avx512 {
        pub(crate) fn detect() -> Option<Self> {
            let found = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq");
            found.then_some(Self(()))
        }
    }

    /// Methods that consist of intrinsics.
    macro_rules! intrinsics {
        ($(fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? { $($body:tt)* })*) => {$(
            #[inline(always)]
            fn $name(self, $($arg: $ty),*) $(-> $ret)? {
                // SAFETY: `detect` made `self`, so the CPU has the instructions.
                unsafe { $($body)* }
            }
        )*};
    }

    /// Methods that consist of intrinsics with a pointer.
    macro_rules! memory_intrinsics {
        ($(fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? { $($body:tt)* })*) => {$(
            #[inline(always)]
            unsafe fn $name(self, $($arg: $ty),*) $(-> $ret)? {
                // SAFETY: `detect` made `self`, so the CPU has the instructions; the caller vouches for the memory,
                // and none of these instructions asks for alignment.
                unsafe { $($body)* }
            }
        )*};
    }

    impl Simd for Avx2 {
        type V = __m256;
        const LANES: usize = 8;
        const ROWS: usize = 2;

        intrinsics! {
            fn splat(x: f32) -> __m256 { _mm256_set1_ps(x) }
            fn add(a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
            fn sub(a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
            fn mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
            fn div(a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
            fn fma(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
            fn max(a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
            fn min(a: __m256, b: __m256) -> __m256 { _mm256_min_ps(a, b) }
            fn round(x: __m256) -> __m256 {
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x)
            }
            fn scale_by_power(x: __m256, n: __m256) -> __m256 {
                let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)))
            }
            fn select_less(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
                _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
            }
            fn sum_each(vectors: [__m256; 4]) -> [f32; 4] {
                let [a, b, c, d] = vectors;
                let halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
                let sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
                let mut out = [0.0; 4];
                _mm_storeu_ps(out.as_mut_ptr(), sums);
                out
            }
            fn iota() -> __m256 { _mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0) }
            fn prefetch(address: *const u8) { _mm_prefetch::<_MM_HINT_T0>(address.cast()); }
        }

        memory_intrinsics! {
            fn load(from: *const f32) -> __m256 { _mm256_loadu_ps(from) }
            fn load_f16(from: *const f16) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
            fn load_bf16(from: *const bf16) -> __m256 {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            }
            fn store(to: *mut f32, x: __m256) { _mm256_storeu_ps(to, x); }
        }
    }

    impl Simd for Avx512 {
        type V = __m512;
        const LANES: usize = 16;
        const ROWS: usize = 4;

        intrinsics! {
            fn splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
            fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
            fn sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
            fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
            fn div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
            fn fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
            fn max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
            fn min(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
            fn round(x: __m512) -> __m512 { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) }
            fn scale_by_power(x: __m512, n: __m512) -> __m512 { _mm512_scalef_ps(x, n) }
            fn select_less(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
                _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x)
            }
            fn sum_each(vectors: [__m512; 4]) -> [f32; 4] {
                let [a, b, c, d] = vectors;
                let a = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
                let b = _mm256_add_ps(_mm512_castps512_ps256(b), _mm512_extractf32x8_ps::<1>(b));
                let c = _mm256_add_ps(_mm512_castps512_ps256(c), _mm512_extractf32x8_ps::<1>(c));
                let d = _mm256_add_ps(_mm512_castps512_ps256(d), _mm512_extractf32x8_ps::<1>(d));
                let halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
                let sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
                let mut out = [0.0; 4];
                _mm_storeu_ps(out.as_mut_ptr(), sums);
                out
            }
            fn iota() -> __m512 {
                _mm512_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0)
            }
            fn prefetch(address: *const u8) { _mm_prefetch::<_MM_HINT_T0>(address.cast()); }
        }

        memory_intrinsics! {
            fn load(from: *const f32) -> __m512 { _mm512_loadu_ps(from) }
            fn load_f16(from: *const f16) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
            fn load_bf16(from: *const bf16) -> __m512 {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            }
            fn store(to: *mut f32, x: __m512) { _mm512_storeu_ps(to, x); }
        }
    }
}
