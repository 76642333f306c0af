//! Strided views of memory that somebody else owns.
//!
//! A view hands out addresses of *rows*: the `head_dim` adjacent elements of one token and head. It never
//! makes a reference into K or V, since other threads may be writing other blocks of the same array.

use std::marker::PhantomData;

use super::element::Element;

/// Values of a step's tokens: `[tokens, heads, head_dim]`, rows adjacent, other strides free.
#[derive(Debug, Clone, Copy)]
pub struct TokenView<'a, E> {
    data: *const E,
    tokens: usize,
    heads: usize,
    head_dim: usize,
    strides: [isize; 2],
    memory: PhantomData<&'a [E]>,
}

// SAFETY: the view only reads, and its constructor's contract lets it be read for 'a from anywhere.
unsafe impl<E: Element> Send for TokenView<'_, E> {}
// SAFETY: as above.
unsafe impl<E: Element> Sync for TokenView<'_, E> {}

impl<'a, E: Element> TokenView<'a, E> {
    /// A view of a dense array.
    ///
    /// # Panics
    ///
    /// If the slice is not exactly as long as the shape says.
    pub fn new(data: &'a [E], [tokens, heads, head_dim]: [usize; 3]) -> Self {
        assert_eq!(data.len(), tokens * heads * head_dim, "the slice must be as long as its shape says");
        let strides = [(heads * head_dim) as isize, head_dim as isize];
        Self { data: data.as_ptr(), tokens, heads, head_dim, strides, memory: PhantomData }
    }

    /// A view of an array with any strides, in elements, of tokens and heads.
    ///
    /// # Safety
    ///
    /// `data` must be aligned, and every element that the shape and the strides reach must be readable and
    /// initialized for `'a`, with nobody writing it.
    pub unsafe fn from_raw_parts(
        data: *const E,
        [tokens, heads, head_dim]: [usize; 3],
        strides: [isize; 2],
    ) -> Self {
        Self { data, tokens, heads, head_dim, strides, memory: PhantomData }
    }

    /// `[tokens, heads, head_dim]`.
    pub fn shape(&self) -> [usize; 3] {
        [self.tokens, self.heads, self.head_dim]
    }

    /// The distance from a token's first row to the next one's.
    pub(crate) fn token_stride(&self) -> isize {
        self.strides[0]
    }

    pub(crate) fn has_adjacent_heads(&self) -> bool {
        self.strides[1] == self.head_dim as isize
    }

    /// The address of `head_dim` readable elements.
    pub(crate) fn row(&self, token: usize, head: usize) -> *const E {
        assert!(token < self.tokens && head < self.heads, "row ({token}, {head}) is outside the view");
        // SAFETY: the indices are within the shape, whose elements the constructor's caller vouches for.
        unsafe { self.data.offset(token as isize * self.strides[0] + head as isize * self.strides[1]) }
    }
}

/// K or V of one layer: `[num_physical_blocks, block_size, num_kv_heads, head_dim]`, rows adjacent, other
/// strides free, so that NHD, HND and K and V packed in one array are all read in place.
#[derive(Debug, Clone, Copy)]
pub struct PagedView<'a, E> {
    data: *const E,
    num_blocks: usize,
    block_size: usize,
    heads: usize,
    head_dim: usize,
    strides: [isize; 3],
    memory: PhantomData<&'a [E]>,
}

// SAFETY: the view only reads, and its constructor's contract lets what is read be read from anywhere.
unsafe impl<E: Element> Send for PagedView<'_, E> {}
// SAFETY: as above.
unsafe impl<E: Element> Sync for PagedView<'_, E> {}

impl<'a, E: Element> PagedView<'a, E> {
    /// A view of a dense array.
    ///
    /// # Panics
    ///
    /// If the slice is not exactly as long as the shape says.
    pub fn new(data: &'a [E], shape: [usize; 4]) -> Self {
        assert_eq!(
            data.len(),
            shape.iter().product::<usize>(),
            "the slice must be as long as its shape says"
        );
        // SAFETY: a shared slice is readable for 'a, nobody writes it, and dense strides stay within it.
        unsafe { Self::from_raw_parts(data.as_ptr(), shape, dense_strides(shape)) }
    }

    /// A view of an array with any strides, in elements, of blocks, tokens and heads.
    ///
    /// # Safety
    ///
    /// `data` must be aligned, and every element that the shape and the strides reach must lie in one
    /// allocation and be readable and initialized for `'a`. Nobody may write the rows that a call reads
    /// during that call; other rows are free.
    pub unsafe fn from_raw_parts(data: *const E, shape: [usize; 4], strides: [isize; 3]) -> Self {
        let [num_blocks, block_size, heads, head_dim] = shape;
        Self { data, num_blocks, block_size, heads, head_dim, strides, memory: PhantomData }
    }

    /// `[num_physical_blocks, block_size, num_kv_heads, head_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        [self.num_blocks, self.block_size, self.heads, self.head_dim]
    }

    /// The address of `head_dim` readable elements.
    ///
    /// Callers have checked the block before, with a better message. It is looked at again since the table
    /// may lie in memory that the user can write, and a wrong address must not come of that.
    #[inline]
    pub(crate) fn row(&self, block: usize, offset: usize, head: usize) -> *const E {
        assert!(
            block < self.num_blocks && offset < self.block_size && head < self.heads,
            "row ({block}, {offset}, {head}) is outside the view"
        );
        let [block_stride, token_stride, head_stride] = self.strides;
        let place =
            block as isize * block_stride + offset as isize * token_stride + head as isize * head_stride;
        // SAFETY: the indices are within the shape, whose elements the constructor's caller vouches for.
        unsafe { self.data.offset(place) }
    }

    /// The distance from a token's row to the next one's.
    #[inline]
    pub(crate) fn token_stride(&self) -> isize {
        self.strides[1]
    }

    /// The distance from a head's row to the next one's.
    #[inline]
    pub(crate) fn head_stride(&self) -> isize {
        self.strides[2]
    }

    pub(crate) fn has_adjacent_heads(&self) -> bool {
        self.strides[2] == self.head_dim as isize
    }

    /// Whether each block is one piece of memory that begins with its first row.
    pub(crate) fn has_dense_blocks(&self) -> bool {
        let (token, head) = (self.strides[1], self.strides[2]);
        let (size, heads, dim) = (self.block_size as isize, self.heads as isize, self.head_dim as isize);
        (head == dim && token == heads * dim) || (token == dim && head == size * dim)
    }
}

/// A [`PagedView`] that can be written.
#[derive(Debug)]
pub struct PagedViewMut<'a, E> {
    view: PagedView<'a, E>,
    memory: PhantomData<&'a mut [E]>,
}

impl<'a, E: Element> PagedViewMut<'a, E> {
    /// A view of a dense array.
    ///
    /// # Panics
    ///
    /// If the slice is not exactly as long as the shape says.
    pub fn new(data: &'a mut [E], shape: [usize; 4]) -> Self {
        assert_eq!(
            data.len(),
            shape.iter().product::<usize>(),
            "the slice must be as long as its shape says"
        );
        // SAFETY: an exclusive slice may be written for 'a, and dense strides stay within it without overlap.
        unsafe { Self::from_raw_parts(data.as_mut_ptr(), shape, dense_strides(shape)) }
    }

    /// A view of an array with any strides, in elements, of blocks, tokens and heads.
    ///
    /// # Safety
    ///
    /// As [`PagedView::from_raw_parts`]; moreover the elements must be writable, no two indices may reach the
    /// same element, and nobody else may touch the rows that a call writes during that call.
    pub unsafe fn from_raw_parts(data: *mut E, shape: [usize; 4], strides: [isize; 3]) -> Self {
        // SAFETY: the caller vouches for what reading needs, too.
        let view = unsafe { PagedView::from_raw_parts(data.cast_const(), shape, strides) };
        Self { view, memory: PhantomData }
    }

    /// The same memory, to be read.
    pub fn as_view(&self) -> &PagedView<'a, E> {
        &self.view
    }

    /// The address of `head_dim` writable elements.
    pub(crate) fn row_mut(&self, block: usize, offset: usize, head: usize) -> *mut E {
        self.view.row(block, offset, head).cast_mut()
    }
}

fn dense_strides([_, block_size, heads, head_dim]: [usize; 4]) -> [isize; 3] {
    [(block_size * heads * head_dim) as isize, (heads * head_dim) as isize, head_dim as isize]
}
