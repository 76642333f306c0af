//! The matrix unit of Intel's server CPUs from Sapphire Rapids on: products of bf16 with sums in f32, a tile of 16 rows
//! of 64 bytes at a time. Compilers have no stable intrinsics for it, so the instructions are written out.

use std::arch::asm;
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "the prefix names them"))]
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// Bytes of a tile's row.
pub(crate) const ROW_BYTES: usize = 64;
/// Rows of a tile.
pub(crate) const ROWS: usize = 16;
/// Lanes of two tiles side by side; matrices of weights, sums, queries and scores have rows of so many 32-bit words.
pub(crate) const LANES: usize = 32;

/// A proof that the CPU has the unit, that the system lets this process use it, and that AVX-512 for bf16 is there, too.
#[derive(Clone, Copy)]
pub(crate) struct Amx(());

/// What the tiles look like: all eight are of full size.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

#[expect(clippy::unused_self, reason = "it is the proof that the instructions are there")]
impl Amx {
    pub(crate) fn detect() -> Option<Self> {
        static FOUND: OnceLock<bool> = OnceLock::new();
        FOUND.get_or_init(is_usable).then_some(Self(()))
    }

    /// Sets the thread's tiles up.
    pub(crate) fn configure(self) {
        let mut all =
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        all.row_bytes[..8].fill(ROW_BYTES as u16);
        all.rows[..8].fill(ROWS as u8);
        // SAFETY: `self` proves that the instruction is there; it reads 64 bytes. No compiled code uses tiles.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const all, options(nostack, preserves_flags, readonly));
        }
    }

    /// Gives the tiles up, so that the system need not save them.
    pub(crate) fn release(self) {
        // SAFETY: as above.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }

    /// `c[32, LANES] = a[32, 32 * steps] b`, or `+=`. A row of `b` holds a pair of neighbouring rows' elements for each
    /// lane. If not `both`, the second 16 lanes are left alone.
    ///
    /// # Safety
    /// The tiles must be configured. `a` must have 32 rows of `64 * steps` readable bytes, `a_stride` bytes apart, `b`
    /// `16 * steps` rows of LANES words, `c` 32 rows of LANES words, writable, and readable if they are added to.
    pub(crate) unsafe fn multiply(
        self,
        [a, b]: [*const u8; 2],
        a_stride: usize,
        steps: usize,
        c: *mut f32,
        adds: bool,
        both: bool,
    ) {
        const STRIDE: usize = 4 * LANES;
        const HALF: usize = ROWS * STRIDE;
        let lower = c.wrapping_byte_add(HALF);
        // SAFETY: `self` proves that the instructions are there; the caller vouches for the memory. No compiled code
        // uses tiles.
        unsafe {
            if adds {
                asm!(
                    "tileloadd tmm0, [{c} + {stride}]",
                    "tileloadd tmm2, [{lower} + {stride}]",
                    c = in(reg) c, lower = in(reg) lower, stride = in(reg) STRIDE,
                    options(nostack, preserves_flags, readonly)
                );
            } else {
                asm!("tilezero tmm0", "tilezero tmm2", options(nostack, preserves_flags, nomem));
            }
            if !both {
                asm!(
                    "2:",
                    "tileloadd tmm4, [{a} + {a_stride}]",
                    "tileloadd tmm6, [{b} + {stride}]",
                    "tileloadd tmm5, [{a_lower} + {a_stride}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "add {a}, 64",
                    "add {a_lower}, 64",
                    "add {b}, {half}",
                    "dec {steps}",
                    "jnz 2b",
                    "tilestored [{c} + {stride}], tmm0",
                    "tilestored [{lower} + {stride}], tmm2",
                    a = inout(reg) a => _, a_lower = inout(reg) a.wrapping_add(ROWS * a_stride) => _,
                    b = inout(reg) b => _, steps = inout(reg) steps => _,
                    c = in(reg) c, lower = in(reg) lower,
                    a_stride = in(reg) a_stride, stride = in(reg) STRIDE, half = const HALF,
                    options(nostack)
                );
                return;
            }
            if adds {
                asm!(
                    "tileloadd tmm1, [{c} + {stride} + 64]",
                    "tileloadd tmm3, [{lower} + {stride} + 64]",
                    c = in(reg) c, lower = in(reg) lower, stride = in(reg) STRIDE,
                    options(nostack, preserves_flags, readonly)
                );
            } else {
                asm!("tilezero tmm1", "tilezero tmm3", options(nostack, preserves_flags, nomem));
            }
            asm!(
                "2:",
                "tileloadd tmm4, [{a} + {a_stride}]",
                "tileloadd tmm6, [{b} + {stride}]",
                "tileloadd tmm7, [{b} + {stride} + 64]",
                "tileloadd tmm5, [{a_lower} + {a_stride}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 64",
                "add {a_lower}, 64",
                "add {b}, {half}",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{c} + {stride}], tmm0",
                "tilestored [{c} + {stride} + 64], tmm1",
                "tilestored [{lower} + {stride}], tmm2",
                "tilestored [{lower} + {stride} + 64], tmm3",
                a = inout(reg) a => _, a_lower = inout(reg) a.wrapping_add(ROWS * a_stride) => _,
                b = inout(reg) b => _, steps = inout(reg) steps => _,
                c = in(reg) c, lower = in(reg) lower,
                a_stride = in(reg) a_stride, stride = in(reg) STRIDE, half = const HALF,
                options(nostack)
            );
        }
    }
}

/// Whether CPU and system have the unit, and let this process use it.
fn is_usable() -> bool {
    /// Bits of leaf 7's edx: bf16 in tiles, tiles.
    const UNIT: u32 = 1 << 22 | 1 << 24;
    /// Bits of the register of enabled states: the tiles' configuration and data.
    const STATES: u64 = 3 << 17;
    if !(is_x86_feature_detected!("avx512bf16")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("xsave"))
    {
        return false;
    }
    if __cpuid_count(7, 0).edx & UNIT != UNIT {
        return false;
    }
    // SAFETY: xsave is there.
    if unsafe { enabled_states() } & STATES != STATES {
        return false;
    }
    permit()
}

#[target_feature(enable = "xsave")]
fn enabled_states() -> u64 {
    // SAFETY: register 0 is always there.
    unsafe { _xgetbv(0) }
}

/// Linux makes room for the tiles' state only for processes that ask.
#[cfg(target_os = "linux")]
fn permit() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permit() -> bool {
    false
}
