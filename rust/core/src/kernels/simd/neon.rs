//! NEON, which every 64-bit Arm CPU has.

#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the prefix names them"))]
use std::arch::aarch64::*;
use std::arch::asm;

use half::{bf16, f16};

use super::Simd;

/// Vectors of four.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

impl Neon {
    pub(crate) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
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

impl Simd for Neon {
    type V = float32x4_t;
    const LANES: usize = 4;
    const ROWS: usize = 4;
    const BLOCK: usize = 8;

    intrinsics! {
        fn splat(x: f32) -> float32x4_t { vdupq_n_f32(x) }
        fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t { vaddq_f32(a, b) }
        fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t { vsubq_f32(a, b) }
        fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t { vmulq_f32(a, b) }
        fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t { vdivq_f32(a, b) }
        fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t { vfmaq_f32(c, a, b) }
        fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t { vbslq_f32(vcgtq_f32(a, b), a, b) }
        fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t { vbslq_f32(vcltq_f32(a, b), a, b) }
        fn round(x: float32x4_t) -> float32x4_t { vrndnq_f32(x) }
        fn scale_by_power(x: float32x4_t, n: float32x4_t) -> float32x4_t {
            let biased = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
            vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased)))
        }
        fn select_less(a: float32x4_t, b: float32x4_t, x: float32x4_t, y: float32x4_t) -> float32x4_t {
            vbslq_f32(vcltq_f32(a, b), x, y)
        }
        fn sum_each(vectors: [float32x4_t; 4]) -> [f32; 4] {
            let [a, b, c, d] = vectors;
            let sums = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
            let mut out = [0.0; 4];
            vst1q_f32(out.as_mut_ptr(), sums);
            out
        }
        fn iota() -> float32x4_t { vld1q_f32([0.0, 1.0, 2.0, 3.0].as_ptr()) }
        fn prefetch(address: *const u8) {
            asm!("prfm pldl2keep, [{0}]", in(reg) address, options(nostack, readonly, preserves_flags));
        }
    }

    memory_intrinsics! {
        fn load(from: *const f32) -> float32x4_t { vld1q_f32(from) }
        fn load_f16(from: *const f16) -> float32x4_t {
            // The conversion belongs to the baseline; the intrinsics' f16 type is not stable everywhere.
            let wide: float32x4_t;
            asm!(
                "ldr {0:d}, [{1}]",
                "fcvtl {0:v}.4s, {0:v}.4h",
                out(vreg) wide,
                in(reg) from,
                options(nostack, readonly, preserves_flags)
            );
            wide
        }
        fn load_bf16(from: *const bf16) -> float32x4_t {
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.cast())))
        }
        fn store(to: *mut f32, x: float32x4_t) { vst1q_f32(to, x); }
        fn store_f16(to: *mut f16, x: float32x4_t) {
            asm!(
                "fcvtn {0:v}.4h, {0:v}.4s",
                "str {0:d}, [{1}]",
                inout(vreg) x => _,
                in(reg) to,
                options(nostack, preserves_flags)
            );
        }
        fn store_bf16(to: *mut bf16, x: float32x4_t) {
            let bits = vreinterpretq_u32_f32(x);
            let is_odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(is_odd, vdupq_n_u32(0x7FFF)));
            let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
            let upper = vbslq_u32(vceqq_f32(x, x), rounded, quiet);
            vst1_u16(to.cast(), vshrn_n_u32::<16>(upper));
        }
    }
}
