//! How a call of attention is cut into tiles: by rows, so that many queries share a load of K and V; by prefixes, so that
//! sequences that share blocks share their loads, too; and along the context, so that one long sequence keeps all
//! threads busy (`FlashDecoding`, Dao et al. 2023). Results that come in parts are merged by their denominators.

use std::cmp::Reverse;
use std::ops::{Range, RangeInclusive};

use super::attention::Step;
use super::job::{Query, Tile};

/// So many rows (queries times the heads that share a KV head) are worked on together: enough that loading and
/// rearranging K and V is paid for, few enough that their state stays in the second-level cache.
const TILE_ROWS: RangeInclusive<usize> = 96..=768;

/// Numbers of a tile's queries that may belong to several KV heads; with more, each head gets a tile of its own.
const TILE_NUMBERS: usize = 1 << 16;

/// Keys below which neither a shared prefix nor a piece of a context is worth the merging.
const SHORTEST_PREFIX: usize = 64;
const SHORTEST_PIECE: usize = 256;

/// Rows as expensive as loading a key.
const LOAD: usize = 8;

/// Pieces of work for each thread: their ends meet better than with one large piece each.
const PIECES: usize = 4;

/// What a schedule depends on besides the step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) block_size: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Query heads of one KV head.
    pub(crate) group: usize,
    pub(crate) threads: usize,
}

/// Tiles, and what is to be merged when they are done.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    pub(crate) queries: Vec<Query>,
    /// The most expensive first.
    pub(crate) tiles: Vec<Tile>,
    /// Of each token whose result comes in parts: the token, and where its parts' numbers are in `parts`.
    pub(crate) merges: Vec<(usize, Range<usize>)>,
    pub(crate) parts: Vec<usize>,
    /// How many partial results there are.
    pub(crate) partials: usize,
}

/// Queries of some rows that see, or begin to see, the same keys.
struct Segment {
    rows: Vec<usize>,
    keys: Range<usize>,
    is_shared: bool,
}

impl Schedule {
    pub(crate) fn new(step: &Step<'_>, sliding_window: Option<usize>, sizes: &Sizes) -> Self {
        let mut schedule = Self::default();
        // Of all heads; fewer rows to a tile where that keeps more threads busy.
        let rows =
            step.query_start_loc.last().map_or(0, |&stop| stop as usize * sizes.group * sizes.num_kv_heads);
        let pieces = if sizes.threads > 1 { PIECES * sizes.threads } else { 1 };
        let rows = (rows / pieces).clamp(*TILE_ROWS.start(), *TILE_ROWS.end());
        for segment in segments(step, sliding_window, sizes.block_size) {
            schedule.cut(step, sliding_window, sizes, (rows / sizes.group).max(1), &segment);
        }
        schedule.split(sizes);
        schedule.number_parts();
        let cost =
            |tile: &Tile| tile.keys.len() * (tile.queries.len() * sizes.group + LOAD) * tile.heads.len();
        schedule.tiles.sort_by_key(|tile| Reverse(cost(tile)));
        schedule
    }

    /// Runs of at most `most` queries.
    fn cut(
        &mut self,
        step: &Step<'_>,
        sliding_window: Option<usize>,
        sizes: &Sizes,
        most: usize,
        segment: &Segment,
    ) {
        let first = self.queries.len();
        for &row in &segment.rows {
            let (start, stop) = (step.query_start_loc[row] as usize, step.query_start_loc[row + 1] as usize);
            let length = step.seq_lens[row] as usize;
            self.queries.extend((start..stop).map(|token| Query {
                token,
                // A row of length 0 has no positions: its queries see nothing.
                position: (length + token).checked_sub(stop).filter(|_| length > 0),
            }));
        }
        for start in (first..self.queries.len()).step_by(most) {
            let queries = start..(start + most).min(self.queries.len());
            let mut keys = segment.keys.clone();
            if !segment.is_shared {
                let position = |query: usize| self.queries[query].position;
                let stop = position(queries.end - 1).map_or(keys.start, |last| last + 1);
                let seen =
                    |window: usize| position(start).map_or(0, |first| (first + 1).saturating_sub(window));
                keys = keys.start.max(sliding_window.map_or(0, seen))..stop;
            }
            let rows = queries.len() * sizes.group;
            let heads = (TILE_NUMBERS / (rows * sizes.head_dim).max(1)).clamp(1, sizes.num_kv_heads);
            // Heads are dealt out when it is known how many tiles there are; till then `end` says how many go together.
            let partial = segment.is_shared.then_some(0);
            self.tiles.push(Tile { row: segment.rows[0], queries, keys, heads: 0..heads, partial });
        }
    }

    /// Splits tiles along the context where one of them alone would keep the others waiting, and deals out the heads.
    fn split(&mut self, sizes: &Sizes) {
        let cost = |tile: &Tile| tile.keys.len() * (tile.queries.len() * sizes.group + LOAD);
        let total: usize = self.tiles.iter().map(cost).sum();
        let wanted = if sizes.threads > 1 { PIECES * sizes.threads } else { 1 };
        let mut pieces = Vec::with_capacity(self.tiles.len());
        for tile in &self.tiles {
            let keys = tile.keys.clone();
            let most = (keys.len() / SHORTEST_PIECE).max(1);
            let count = ((2 * cost(tile) * wanted + total) / (2 * total).max(1)).clamp(1, most);
            let bound = |piece: usize| {
                let place = keys.start + piece * keys.len() / count;
                if piece == 0 || piece == count { place } else { place / sizes.block_size * sizes.block_size }
            };
            for piece in 0..count {
                let partial = if count > 1 { Some(0) } else { tile.partial };
                pieces.push(Tile { keys: bound(piece)..bound(piece + 1), partial, ..tile.clone() });
            }
        }
        let enough = if sizes.threads > 1 { 2 * sizes.threads } else { 1 };
        let groups = enough.div_ceil(pieces.len().max(1));
        self.tiles.clear();
        for tile in pieces {
            let together = tile.heads.end.min(sizes.num_kv_heads.div_ceil(groups));
            for start in (0..sizes.num_kv_heads).step_by(together) {
                let heads = start..(start + together).min(sizes.num_kv_heads);
                self.tiles.push(Tile { heads, ..tile.clone() });
            }
        }
    }

    /// Gives every partial result a number, and every token the list of its own.
    fn number_parts(&mut self) {
        // Queries of tokens whose result comes in parts somewhere: all their results are parts.
        let tokens = self.queries.iter().map(|query| query.token + 1).max().unwrap_or(0);
        let mut is_partial = vec![false; tokens];
        for tile in self.tiles.iter().filter(|tile| tile.partial.is_some()) {
            self.queries[tile.queries.clone()].iter().for_each(|query| is_partial[query.token] = true);
        }
        let mut found = Vec::new();
        for tile in &mut self.tiles {
            let queries = &self.queries[tile.queries.clone()];
            tile.partial = None;
            if queries.iter().any(|query| is_partial[query.token]) {
                // Tiles of the same queries and keys differ in their heads, and have one result.
                if tile.heads.start == 0 {
                    found.extend(
                        queries.iter().enumerate().map(|(i, query)| (query.token, self.partials + i)),
                    );
                    self.partials += queries.len();
                }
                tile.partial = Some(self.partials - queries.len());
            }
        }
        found.sort_unstable();
        for run in found.chunk_by(|one, other| one.0 == other.0) {
            let start = self.parts.len();
            self.parts.extend(run.iter().map(|&(_, part)| part));
            self.merges.push((run[0].0, start..self.parts.len()));
        }
    }
}

/// All rows that have queries, with what they see.
fn segments(step: &Step<'_>, sliding_window: Option<usize>, block_size: usize) -> Vec<Segment> {
    let queries = |row: usize| (step.query_start_loc[row + 1] - step.query_start_loc[row]) as usize;
    let mut rows: Vec<usize> = (0..step.seq_lens.len()).filter(|&row| queries(row) > 0).collect();
    let length = |row: usize| step.seq_lens[row] as usize;
    // Blocks whose keys all of the row's queries see. Under a window they see different parts of them.
    let common = |row: usize| match sliding_window {
        None if length(row) > 0 => &step.block_table[row][..(length(row) - queries(row) + 1) / block_size],
        _ => &[],
    };
    rows.sort_by(|&one, &other| common(one).cmp(common(other)));
    let mut tree = Tree { common: &common, length: &length, block_size, segments: Vec::new() };
    tree.part(&rows, 0, 0);
    tree.segments
}

/// Rows in the order of their block tables form a tree of prefixes.
struct Tree<'a> {
    common: &'a dyn Fn(usize) -> &'a [i32],
    length: &'a dyn Fn(usize) -> usize,
    block_size: usize,
    segments: Vec<Segment>,
}

impl Tree<'_> {
    /// Takes apart rows that have the first `equal` blocks in common, of which the first `done` are dealt with.
    fn part(&mut self, rows: &[usize], equal: usize, mut done: usize) {
        if let &[row] = rows {
            let keys = done * self.block_size..(self.length)(row);
            // A row that shares all its blocks has nothing of its own.
            if !keys.is_empty() || done == 0 {
                self.segments.push(Segment { rows: vec![row], keys, is_shared: false });
            }
            return;
        }
        let same = |pair: &[usize]| {
            let (one, other) = (&(self.common)(pair[0])[equal..], &(self.common)(pair[1])[equal..]);
            equal + one.iter().zip(other).take_while(|(a, b)| a == b).count()
        };
        let shared = rows.windows(2).map(same).min().unwrap_or(equal);
        if (shared - done) * self.block_size >= SHORTEST_PREFIX {
            let keys = done * self.block_size..shared * self.block_size;
            self.segments.push(Segment { rows: rows.to_vec(), keys, is_shared: true });
            done = shared;
        }
        let next = |row: usize| (self.common)(row).get(shared);
        let goes_on = |&one: &usize, &other: &usize| next(one).is_some() && next(one) == next(other);
        for part in rows.chunk_by(goes_on) {
            self.part(part, shared, done);
        }
    }
}
