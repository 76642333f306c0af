//! The types in which K and V are stored.

use half::{bf16, f16};

/// How the bits of an [`Element`] are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A storage type; arithmetic is in f32 for all of them.
pub trait Element: Copy + Default + Send + Sync + 'static + sealed::Sealed {
    /// How its bits are to be read.
    const FORMAT: Format;

    /// The same number.
    fn to_f32(self) -> f32;

    /// The nearest number, ties to even.
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    const FORMAT: Format = Format::F32;

    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for f16 {
    const FORMAT: Format = Format::F16;

    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }

    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
}

impl Element for bf16 {
    const FORMAT: Format = Format::Bf16;

    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }

    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
}
