//! The blank blocks: one bit each, in words of 64, below a tree that says which words have any.
//!
//! Lock-free. A word of the lowest level is a chunk of 64 ids that lie side by side: one atomic operation
//! takes as many of them as are wanted, or gives them back, and as a bit has no history there is no ABA.
//! A thread takes no more ids than it has reserved, so nobody who is stopped half way keeps others from
//! theirs.
//!
//! ```text
//! level 2                     [ 1 ]                     bit i: word i of level 1 may have a bit
//! level 1          [ 1 1 0 1 ... ]   [ 0 0 0 ... ]      bit i: word i of level 0 may have a bit
//! level 0    [0110...] [1000...] [0000...] [1111...]    bit i: block i is blank
//! ```
//!
//! The levels above the lowest are hints. Who fills an empty word marks it, who empties one takes the mark
//! away and looks once more; when these cross, a mark may be missing for a while. So who has reserved blocks
//! and finds none by the marks looks at every word ([`BlankBlocks::take_anywhere`]).

use crate::{
    ids::BlockId,
    sync::{AtomicU64, Ordering},
};

/// Bits a word; in a model, few enough for a tree.
const BITS: usize = if cfg!(any(loom, schedules)) { 2 } else { u64::BITS as usize };

pub(super) struct BlankBlocks {
    /// From the blocks up to the one word at the top.
    levels: Box<[Box<[AtomicU64]>]>,
}

impl BlankBlocks {
    /// All blocks of a pool; block 0 is never blank.
    pub(super) fn new(num_blocks: usize) -> Self {
        let mut levels = Vec::new();
        let (mut first, mut stop) = (1, num_blocks + 1);
        loop {
            let set = |word: usize| {
                let bits = (word * BITS).max(first)..((word + 1) * BITS).min(stop);
                bits.fold(0, |word, bit| word | 1 << (bit % BITS))
            };
            levels.push((0..stop.div_ceil(BITS)).map(|word| AtomicU64::new(set(word))).collect());
            if stop <= BITS {
                return Self { levels: levels.into() };
            }
            (first, stop) = (0, stop.div_ceil(BITS));
        }
    }

    /// Give back the blocks of one word, which are the caller's alone.
    fn give(&self, word: usize, bits: u64) {
        // Release: what the last users did to the blocks happens before what the next ones do.
        if self.levels[0][word].fetch_or(bits, Ordering::Release) == 0 {
            self.mark(word);
        }
    }

    /// Append up to `most` blocks to `taken` that the marks lead to.
    pub(super) fn take(&self, most: usize, taken: &mut Vec<BlockId>) {
        let end = taken.len() + most;
        while taken.len() < end
            && let Some(word) = self.find()
        {
            self.take_from(word, end - taken.len(), taken);
        }
    }

    /// The same, whatever the marks say; takes time in proportion to the pool.
    pub(super) fn take_anywhere(&self, most: usize, taken: &mut Vec<BlockId>) {
        let end = taken.len() + most;
        for word in 0..self.levels[0].len() {
            if taken.len() < end {
                self.take_from(word, end - taken.len(), taken);
            }
        }
    }

    fn take_from(&self, word: usize, most: usize, taken: &mut Vec<BlockId>) {
        let bits = &self.levels[0][word];
        let wanted = lowest(bits.load(Ordering::Relaxed), most);
        // Acquire: see `give`. Others may have taken some of them meanwhile; what was there is ours.
        let before = if wanted == 0 { 0 } else { bits.fetch_and(!wanted, Ordering::Acquire) };
        let mut got = before & wanted;
        while got != 0 {
            taken.push(BlockId::new((word * BITS) as u32 + got.trailing_zeros()));
            got &= got - 1;
        }
        if before & !wanted == 0 {
            self.unmark(word);
        }
    }

    /// A word of the lowest level that has a bit, or had one a moment ago.
    fn find(&self) -> Option<usize> {
        let start = preference();
        'search: loop {
            let mut index = 0;
            for (level, words) in self.levels.iter().enumerate().skip(1).rev() {
                let bits = words[index].load(Ordering::Relaxed);
                if bits == 0 {
                    if level == self.levels.len() - 1 {
                        return None;
                    }
                    self.unmark_at(level + 1, index);
                    continue 'search;
                }
                index = index * BITS + first_from(bits, start);
            }
            let is_empty = self.levels.len() == 1 && self.levels[0][0].load(Ordering::Relaxed) == 0;
            return (!is_empty).then_some(index);
        }
    }

    /// A word of the lowest level has a bit. Relaxed here and in `unmark`: marks are hints.
    fn mark(&self, word: usize) {
        self.mark_at(1, word);
    }

    fn mark_at(&self, level: usize, mut index: usize) {
        for words in &self.levels[level..] {
            if words[index / BITS].fetch_or(1 << (index % BITS), Ordering::Relaxed) != 0 {
                return;
            }
            index /= BITS;
        }
    }

    /// A word of the lowest level is empty.
    fn unmark(&self, word: usize) {
        if self.levels.len() > 1 {
            self.unmark_at(1, word);
        }
    }

    /// Take away the mark at `level` of the word `index` below it, and upwards what is empty by that. Whoever
    /// has filled the word in the meantime has marked it before, so look again.
    fn unmark_at(&self, level: usize, index: usize) {
        let bit = 1 << (index % BITS);
        let before = self.levels[level][index / BITS].fetch_and(!bit, Ordering::Relaxed);
        if self.levels[level - 1][index].load(Ordering::Relaxed) != 0 {
            self.mark_at(level, index);
        } else if before & !bit == 0 && level + 1 < self.levels.len() {
            self.unmark_at(level + 1, index / BITS);
        }
    }

    #[cfg(feature = "internals")]
    pub(super) fn bytes(&self) -> usize {
        self.levels.iter().map(|words| size_of_val(&**words)).sum()
    }

    /// Every blank block once, for the audit; exact while no other thread is at work.
    pub(super) fn snapshot(&self) -> Vec<BlockId> {
        let ids = |(word, bits): (usize, &AtomicU64)| {
            let bits = bits.load(Ordering::Relaxed);
            (0..BITS)
                .filter(move |bit| bits >> bit & 1 == 1)
                .map(move |bit| BlockId::new((word * BITS + bit) as u32))
        };
        self.levels[0].iter().enumerate().flat_map(ids).collect()
    }
}

/// The first bit that is set from `start` on, and round.
fn first_from(bits: u64, start: u32) -> usize {
    ((bits.rotate_right(start).trailing_zeros() + start) % u64::BITS) as usize
}

/// Where this thread begins to look, so that threads that allocate at once are not after the same words.
fn preference() -> u32 {
    #[cfg(any(loom, schedules))]
    return 0; // a model must run the same way each time
    #[cfg(not(any(loom, schedules)))]
    {
        use std::sync::atomic::AtomicU32;
        static THREADS: AtomicU32 = AtomicU32::new(0);
        thread_local! {
            // Steps of the golden ratio are as far apart as can be, however many there are.
            static START: u32 = THREADS.fetch_add(1, Ordering::Relaxed).wrapping_mul(39) % u64::BITS;
        }
        START.with(|start| *start)
    }
}

/// The lowest `most` bits that are set.
fn lowest(bits: u64, most: usize) -> u64 {
    if bits.count_ones() as usize <= most {
        return bits;
    }
    let mut rest = bits;
    for _ in 0..most {
        rest &= rest - 1;
    }
    bits & !rest
}

/// Blank blocks on their way back: one atomic operation for those that lie in one word.
pub(super) struct Giving<'a> {
    blank: &'a BlankBlocks,
    word: usize,
    bits: u64,
    count: usize,
}

impl<'a> Giving<'a> {
    pub(super) fn new(blank: &'a BlankBlocks) -> Self {
        Self { blank, word: 0, bits: 0, count: 0 }
    }

    /// A blank block, which is the caller's alone.
    pub(super) fn add(&mut self, block: BlockId) {
        let word = block.index() / BITS;
        if word != self.word {
            self.flush();
            self.word = word;
        }
        self.bits |= 1 << (block.index() % BITS);
        self.count += 1;
    }

    /// All can be found; returns how many there were.
    pub(super) fn finish(mut self) -> usize {
        self.flush();
        self.count
    }

    fn flush(&mut self) {
        if self.bits != 0 {
            self.blank.give(self.word, std::mem::take(&mut self.bits));
        }
    }
}
