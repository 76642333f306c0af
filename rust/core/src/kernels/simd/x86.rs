//! AVX2 and AVX-512.
#![expect(clippy::needless_range_loop, reason = "arrays are registers, and loops over them are unrolled")]
#![expect(clippy::inline_always, reason = "as in the trait's module")]

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

/// AVX-512 F, DQ and VL: Skylake-SP and Zen 4, and what came after. Without VL, whatever is in a narrow vector at some
/// time could be in half of the registers only.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
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
    const BLOCK: usize = 4;

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
        fn prefetch(address: *const u8) { _mm_prefetch::<_MM_HINT_T1>(address.cast()); }
    }

    memory_intrinsics! {
        fn load(from: *const f32) -> __m256 { _mm256_loadu_ps(from) }
        fn load_f16(from: *const f16) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
        fn load_bf16(from: *const bf16) -> __m256 {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
        fn store(to: *mut f32, x: __m256) { _mm256_storeu_ps(to, x); }
        fn store_f16(to: *mut f16, x: __m256) {
            _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x));
        }
        fn store_bf16(to: *mut bf16, x: __m256) {
            let bits = _mm256_castps_si256(x);
            let is_odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7FFF)));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let upper = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, is_nan));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(upper, upper));
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(packed));
        }
    }
}

impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const ROWS: usize = 4;
    const BLOCK: usize = 8;

    #[inline(always)]
    fn exp2(self, x: __m512) -> __m512 {
        // Below the normal numbers the scaling instruction would take a hundred times as long.
        let floor = self.splat(-126.0);
        let bounded = self.max(floor, x);
        let n = self.round(bounded);
        let power = self.exp2_of_fraction(self.sub(bounded, n));
        // SAFETY: `detect` made `self`, so the CPU has the instructions.
        unsafe { _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, floor), power, n) }
    }

    #[inline(always)]
    fn max_lane(self, x: __m512) -> f32 {
        // SAFETY: as above.
        unsafe { _mm512_reduce_max_ps(x) }
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: the caller's promise; `detect` made `self`, so the CPU has the instructions.
        unsafe {
            let mut r = [_mm512_setzero_si512(); 16];
            for row in 0..16 {
                r[row] = _mm512_loadu_si512(from.add(row * from_stride).cast());
            }
            // Within pairs of rows, pairs of pairs, then quarters and halves of registers.
            let mut t = r;
            for i in 0..8 {
                t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
                t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
            }
            for i in 0..4 {
                r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
                r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
                r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
                r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
            }
            for i in 0..4 {
                t[i] = _mm512_shuffle_i32x4::<0x88>(r[i], r[4 + i]);
                t[4 + i] = _mm512_shuffle_i32x4::<0xDD>(r[i], r[4 + i]);
                t[8 + i] = _mm512_shuffle_i32x4::<0x88>(r[8 + i], r[12 + i]);
                t[12 + i] = _mm512_shuffle_i32x4::<0xDD>(r[8 + i], r[12 + i]);
            }
            for i in 0..8 {
                r[i] = _mm512_shuffle_i32x4::<0x88>(t[i], t[8 + i]);
                r[8 + i] = _mm512_shuffle_i32x4::<0xDD>(t[i], t[8 + i]);
            }
            for row in 0..16 {
                _mm512_storeu_si512(to.add(row * to_stride).cast(), r[row]);
            }
        }
    }

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
            // No horizontal additions: they know half of the registers only, and so would all that leads to them.
            let [a, b, c, d] = vectors;
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (even, odd) = (_mm512_shuffle_ps::<0x44>(ab, cd), _mm512_shuffle_ps::<0xEE>(ab, cd));
            let quarters = _mm512_add_ps(even, odd);
            let halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps::<1>(quarters));
            let sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf32x4_ps::<1>(halves));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), sums);
            out
        }
        fn iota() -> __m512 {
            _mm512_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0)
        }
        fn prefetch(address: *const u8) { _mm_prefetch::<_MM_HINT_T1>(address.cast()); }
    }

    memory_intrinsics! {
        fn load(from: *const f32) -> __m512 { _mm512_loadu_ps(from) }
        fn load_f16(from: *const f16) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
        fn load_bf16(from: *const bf16) -> __m512 {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
        fn store(to: *mut f32, x: __m512) { _mm512_storeu_ps(to, x); }
        fn store_f16(to: *mut f16, x: __m512) {
            _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x));
        }
        fn store_bf16(to: *mut bf16, x: __m512) {
            let bits = _mm512_castps_si512(x);
            let is_odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7FFF)));
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let upper = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(is_nan, rounded, quiet));
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(upper));
        }
    }
}
