//! Vectors of f32, one implementation for each instruction set, so that the kernels are written once.
//!
//! A value of a type that implements [`Simd`] is a proof that the CPU has the instructions: it comes from
//! `detect` only, and so the arithmetic is safe to call. All of it must be inlined into a function with the
//! matching `#[target_feature]`, which [`super::job`] sees to. Hence no closures: they are functions without
//! these features, and vectors go through memory to reach them.
#![expect(
    clippy::inline_always,
    reason = "an intrinsic becomes an instruction only inside a #[target_feature] function"
)]

use half::{bf16, f16};

use super::element::{Element, Format};

#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

/// The most lanes of any implementation; buffers are padded to a multiple of it.
pub(crate) const MAX_LANES: usize = 16;

/// `LANES` numbers at once.
pub(crate) trait Simd: Copy + Send + Sync {
    type V: Copy;
    const LANES: usize;
    /// So many query rows, times four vectors, are accumulated without spilling registers.
    const ROWS: usize;
    /// So many keys (or dimensions), times three vectors of query rows, are accumulated without spilling registers.
    const BLOCK: usize;

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
    /// Rounded to the nearest, ties to even.
    ///
    /// # Safety
    /// `LANES` numbers must be writable.
    unsafe fn store_f16(self, to: *mut f16, x: Self::V);
    /// As [`Simd::store_f16`].
    ///
    /// # Safety
    /// `LANES` numbers must be writable.
    unsafe fn store_bf16(self, to: *mut bf16, x: Self::V);
    /// Asks for the cache line at an address, which need not be valid, to be brought into the second-level cache.
    fn prefetch(self, address: *const u8);

    /// Transposes a block of `LANES` rows of `LANES` numbers; strides are in numbers.
    ///
    /// # Safety
    /// Both blocks must be there; they must not overlap.
    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        for row in 0..Self::LANES {
            for column in 0..Self::LANES {
                // SAFETY: the caller's promise.
                unsafe { *to.add(column * to_stride + row) = *from.add(row * from_stride + column) };
            }
        }
    }

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

    /// Numbers, as a storage type.
    ///
    /// # Safety
    /// `LANES` elements must be writable.
    #[inline(always)]
    unsafe fn store_elements<E: Element>(self, to: *mut E, x: Self::V) {
        // SAFETY: as in `load_elements`.
        unsafe {
            match E::FORMAT {
                Format::F32 => self.store(to.cast(), x),
                Format::F16 => self.store_f16(to.cast(), x),
                Format::Bf16 => self.store_bf16(to.cast(), x),
            }
        }
    }

    /// The first `count` numbers of a storage type, at most `LANES`, widened, then zeros.
    ///
    /// # Safety
    /// `count` elements must be readable.
    #[inline(always)]
    unsafe fn load_up_to<E: Element>(self, from: *const E, count: usize) -> Self::V {
        // SAFETY: the caller's promise; the buffer has room for MAX_LANES >= LANES > count elements.
        unsafe {
            if count >= Self::LANES {
                return self.load_elements(from);
            }
            let mut buffer = [E::default(); MAX_LANES];
            from.copy_to_nonoverlapping(buffer.as_mut_ptr(), count);
            self.load_elements(buffer.as_ptr())
        }
    }

    /// The first `LANES` numbers of a slice.
    #[inline(always)]
    fn get(self, from: &[f32]) -> Self::V {
        assert!(from.len() >= Self::LANES);
        // SAFETY: they are there.
        unsafe { self.load(from.as_ptr()) }
    }

    /// Sets the first `LANES` numbers of a slice.
    #[inline(always)]
    fn put(self, to: &mut [f32], x: Self::V) {
        assert!(to.len() >= Self::LANES);
        // SAFETY: there is room.
        unsafe { self.store(to.as_mut_ptr(), x) };
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

    /// The smallest lane.
    #[inline(always)]
    fn min_lane(self, x: Self::V) -> f32 {
        -self.max_lane(self.sub(self.splat(0.0), x))
    }

    /// 2^x to about one unit in the last place for x <= 127; 0 below -126.
    ///
    /// Polynomial from the Cephes library's `exp2f`.
    #[inline(always)]
    fn exp2(self, x: Self::V) -> Self::V {
        let floor = self.splat(-126.0);
        let bounded = self.max(floor, x); // a NaN stays one
        let n = self.round(bounded);
        let power = self.exp2_of_fraction(self.sub(bounded, n));
        self.select_less(x, floor, self.splat(0.0), self.scale_by_power(power, n))
    }

    /// 2^f for -1/2 <= f <= 1/2.
    #[inline(always)]
    fn exp2_of_fraction(self, f: Self::V) -> Self::V {
        let mut p = self.splat(1.535_336_2e-4);
        for c in [1.339_887_5e-3, 9.618_437e-3, 5.550_332_6e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0] {
            p = self.fma(p, f, self.splat(c));
        }
        p
    }

    /// tanh x to a few units in the last place, for small x, too; from the Cephes library's `tanhf`.
    #[inline(always)]
    fn tanh(self, x: Self::V) -> Self::V {
        let zero = self.splat(0.0);
        let negated = self.sub(zero, x);
        let magnitude = self.max(negated, x);
        // 1 - 2 / (e^2x + 1), which is 1 to the last bit from 9.01 on
        let bounded = self.min(self.splat(10.0), magnitude);
        let grown = self.exp2(self.mul(bounded, self.splat(2.0 * std::f32::consts::LOG2_E)));
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
