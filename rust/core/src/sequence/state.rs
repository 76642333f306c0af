//! What a sequence is: tokens, how far their K and V are computed, and the table that says where.

use std::{
    collections::{HashSet, VecDeque},
    hint::black_box,
    ops::Range,
    sync::Arc,
};

use crate::{
    context::{Context, Extra},
    error::{Error, Result, check_range},
    ids::{BlockId, UNKNOWN_TOKEN},
    key::KeyChain,
    pool::{
        BlockPool, Described, Opening, Shared,
        events::{Note, Origin},
    },
    sequence::steps::Steps,
    table::Table,
};

/// What a fork inherits besides the blocks.
#[derive(Clone)]
pub(crate) struct History {
    pub(super) tokens: Vec<i32>,
    /// Positions of the tokens whose ids are not known, in order.
    pub(super) unknown: VecDeque<usize>,
    /// Sorted by start.
    pub(super) extras: Vec<Extra>,
    /// Keys of full blocks of known tokens.
    pub(super) chain: KeyChain,
    pub(super) read_cache: bool,
    pub(super) write_cache: bool,
    pub(super) num_computed: usize,
    pub(super) num_cached: usize,
    /// Blocks that have had their turn to be published.
    pub(super) num_published: usize,
    /// Of the pool, when the first token was planned or found.
    pub(super) epoch: u64,
    /// For who follows what the pool has; none if nobody does, or there is nothing to say.
    pub(super) origin: Option<Arc<Origin>>,
}

pub(crate) struct SequenceState {
    /// No other sequence of the pool bears it.
    pub(crate) serial: u64,
    pub(super) history: History,
    /// Covers the computed tokens and those in flight.
    pub(crate) table: Table,
    pub(super) steps: Steps,
}

impl SequenceState {
    pub(super) fn new(
        pool: &BlockPool,
        tokens: &[i32],
        context: &Context,
        read_cache: bool,
        write_cache: bool,
    ) -> Self {
        let shared = pool.shared();
        let chain = KeyChain::new(context, shared.block_size);
        let origin = Origin::new(context, chain.root()).filter(|_| shared.has_events());
        let history = History {
            tokens: tokens.to_vec(),
            unknown: VecDeque::new(),
            extras: context.extras().to_vec(),
            chain,
            read_cache,
            write_cache,
            num_computed: 0,
            num_cached: 0,
            num_published: 0,
            epoch: shared.epoch(),
            origin,
        };
        Self { serial: shared.next_serial(), history, table: Table::new(pool), steps: Steps::default() }
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        self.table.pool()
    }

    fn shared(&self) -> &Shared {
        self.pool().shared()
    }

    fn block_size(&self) -> usize {
        self.shared().block_size
    }

    pub(crate) fn tokens(&self) -> &[i32] {
        &self.history.tokens
    }

    pub(crate) fn num_tokens(&self) -> usize {
        self.history.tokens.len()
    }

    pub(crate) fn num_computed(&self) -> usize {
        self.history.num_computed
    }

    pub(crate) fn num_cached(&self) -> usize {
        self.history.num_cached
    }

    pub(crate) fn num_unplanned(&self) -> usize {
        self.num_tokens() - self.table.num_tokens()
    }

    pub(crate) fn is_in_flight(&self) -> bool {
        !self.steps.in_flight.is_empty()
    }

    pub(crate) fn counts_as_query(&self) -> bool {
        self.table.blocks().is_empty() && self.history.read_cache
    }

    pub(crate) fn refuse_in_flight(&self, what: &'static str) -> Result<()> {
        if self.is_in_flight() { Err(Error::PlanInFlight(what)) } else { Ok(()) }
    }

    // Tokens

    /// `extras` lie behind all that is there.
    pub(crate) fn extend_known(&mut self, tokens: &[i32], extras: &[Extra]) -> Result<()> {
        if let Some(first) = extras.iter().min().filter(|first| first.start < self.num_tokens()) {
            let allowed = format!("spans that start at {} or later", self.num_tokens());
            return Err(Error::argument("extras", allowed, first.start));
        }
        self.history.tokens.extend(tokens);
        if !extras.is_empty() {
            self.history.extras.extend_from_slice(extras);
            self.history.extras.sort();
        }
        Ok(())
    }

    pub(crate) fn push_all_known(&mut self, tokens: &[i32]) {
        self.history.tokens.extend_from_slice(tokens);
    }

    /// Append tokens, some of which may be unknown.
    pub(crate) fn push_all(&mut self, tokens: &[i32]) {
        let (start, history) = (self.num_tokens(), &mut self.history);
        history.tokens.extend_from_slice(tokens);
        let unknown = tokens.iter().enumerate().filter(|(_, token)| **token == UNKNOWN_TOKEN);
        history.unknown.extend(unknown.map(|(index, _)| start + index));
    }

    pub(crate) fn knows_all(&self) -> bool {
        self.history.unknown.is_empty()
    }

    pub(crate) fn extend_unknown(&mut self, n: usize) -> Result<()> {
        let (start, history) = (self.num_tokens(), &mut self.history);
        let reserved = history.tokens.try_reserve(n).and_then(|()| history.unknown.try_reserve(n));
        if reserved.is_err() {
            let bytes = n * (size_of::<i32>() + size_of::<usize>());
            return Err(Error::OutOfMemory { name: "token_ids", came: n, bytes });
        }
        history.unknown.extend(start..start + n);
        history.tokens.resize(start + n, UNKNOWN_TOKEN);
        Ok(())
    }

    /// The oldest unknown tokens become known.
    pub(crate) fn resolve(&mut self, tokens: &[i32]) -> Result<()> {
        let num_unknown = self.history.unknown.len();
        if tokens.len() > num_unknown {
            let allowed = format!("at most {num_unknown}, the tokens that are unknown");
            return Err(Error::argument("token_ids", allowed, tokens.len()));
        }
        for (position, token) in self.history.unknown.drain(..tokens.len()).zip(tokens) {
            self.history.tokens[position] = *token;
        }
        self.publish_full_blocks();
        Ok(())
    }

    /// The token at `position`, which is unknown or the next one, becomes known.
    pub(super) fn tell(&mut self, position: usize, token: i32) {
        if position == self.num_tokens() {
            self.push_all_known(&[token]);
        } else {
            self.history.tokens[position] = token;
            if let Ok(index) = self.history.unknown.binary_search(&position) {
                self.history.unknown.remove(index);
            }
        }
        self.publish_full_blocks();
    }

    // Forks and cuts

    pub(crate) fn fork(&mut self) -> Result<Self> {
        self.refuse_in_flight("a sequence in a plan in flight cannot be forked")?;
        self.hash_known_blocks();
        let serial = self.shared().next_serial();
        let table = self.table.fork(self.table.num_tokens())?;
        Ok(Self { serial, history: self.history.clone(), table, steps: Steps::default() })
    }

    /// Before forks are made that would each do it for themselves.
    fn hash_known_blocks(&mut self) {
        let history = &mut self.history;
        let shared = self.table.pool().shared();
        if shared.prefix_cache && (history.read_cache || history.write_cache) {
            let known = history.unknown.front().copied().unwrap_or(history.tokens.len());
            let tokens = &history.tokens[..known];
            history.chain.extend(tokens, &history.extras, shared.block_size, known / shared.block_size);
        }
    }

    /// Go on as another sequence does.
    pub(crate) fn become_fork(&mut self, fork: Self) {
        (self.history, self.table, self.steps) = (fork.history, fork.table, fork.steps);
    }

    pub(crate) fn truncate(&mut self, n: usize) -> Result<()> {
        check_range("n", n, 0, self.num_tokens())?;
        self.refuse_in_flight("a sequence in a plan in flight cannot be truncated")?;
        self.table.check_kept_tokens(n.min(self.num_computed()))?;
        self.cut(n);
        Ok(())
    }

    pub(crate) fn discard_before(&mut self, position: usize) -> Result<()> {
        check_range("position", position, 0, self.num_computed())?;
        self.table.discard_before(position);
        Ok(())
    }

    pub(super) fn cut(&mut self, n: usize) {
        if n < self.table.num_discarded_tokens() {
            self.drop_blocks(); // what is left of the past is not enough to go on from
        }
        let history = &mut self.history;
        history.num_computed = history.num_computed.min(n);
        history.num_cached = history.num_cached.min(n);
        history.tokens.truncate(n);
        history.unknown.truncate(history.unknown.partition_point(|position| *position < n));
        let mut full = n / self.table.pool().block_size();
        if history.extras.iter().any(|extra| extra.stop > n) {
            history.extras.retain(|extra| extra.start < n);
            for extra in history.extras.iter_mut().filter(|extra| extra.stop > n) {
                extra.stop = n;
                // The keys of the blocks that it touches are others now.
                full = full.min(extra.start / self.table.pool().block_size());
            }
            history.extras.sort();
        }
        history.chain.truncate(full);
        history.num_published = history.num_published.min(n / self.table.pool().block_size());
        self.table.cut(self.history.num_computed);
        self.steps.cut(n);
    }

    /// Back to no block and nothing computed; rows in flight count no more.
    pub(crate) fn drop_blocks(&mut self) {
        self.table = Table::new(self.pool());
        self.history.num_computed = 0;
        self.history.num_cached = 0;
        self.history.num_published = 0;
        self.steps.in_flight.clear();
    }

    // The prefix cache

    /// What the cache has behind the prefix that is held, while nothing was computed by itself; nothing is
    /// held. At least one token must be left to compute, so the last one is never a hit.
    pub(crate) fn look_again(&mut self) -> Vec<BlockId> {
        let history = &mut self.history;
        let began = self.table.num_tokens() != history.num_cached || !self.steps.in_flight.is_empty();
        if began || !history.read_cache || history.tokens.is_empty() {
            return Vec::new();
        }
        let shared = self.table.pool().shared();
        let held = self.table.blocks();
        let cut_open = !history.num_cached.is_multiple_of(shared.block_size);
        let other_epoch = !held.is_empty() && history.epoch != shared.epoch();
        if cut_open || other_epoch {
            return Vec::new();
        }
        let most = (history.tokens.len() - 1) / shared.block_size;
        let known = history.unknown.front().copied().unwrap_or(history.tokens.len());
        // Held blocks are published, so the run goes on behind them, unless some were discarded.
        let first = if self.table.has_discarded() { 0 } else { held.len() };
        let tokens = &history.tokens[..known];
        let mut found = shared.find_prefix(&mut history.chain, tokens, &history.extras, first..most);
        found.split_off((held.len() - first).min(found.len()))
    }

    /// Hold the blocks that `look_again` found. If some are not there any more, hold those before them; when
    /// `exact`, hold none and return false, or an error if it was for want of room to count.
    pub(crate) fn hold_found(&mut self, found: &[BlockId], exact: bool) -> Result<bool> {
        if found.is_empty() {
            return Ok(true);
        }
        let held = self.table.blocks().len();
        let expected_epoch = (held > 0).then_some(self.history.epoch);
        let keys = &self.history.chain.keys()[held..held + found.len()];
        let shared = self.table.pool().shared();
        let (blocks, epoch) = shared.hold_prefix(keys, expected_epoch);
        if exact && blocks != found {
            let missing = found.get(blocks.len()).map_or(Ok(()), |block| shared.check_countable(*block));
            shared.unhold_prefix(&blocks);
            return missing.map(|()| false);
        }
        if !blocks.is_empty() {
            self.history.epoch = epoch;
            shared.counters.hit_tokens.add(blocks.len() * shared.block_size);
            self.table.append_found(&blocks);
            self.note_found();
        }
        Ok(true)
    }

    /// Undo `hold_found`, as if it had never been.
    pub(crate) fn unhold_found(&mut self, num_blocks: usize) {
        if num_blocks > 0 {
            let blocks = self.table.take_off_found(num_blocks);
            self.shared().unhold_prefix(&blocks);
            self.shared().counters.hit_tokens.subtract(num_blocks * self.block_size());
            self.note_found();
        }
    }

    /// Give back what `hold_found` found, as a release of now.
    pub(super) fn give_up_found(&mut self, num_blocks: usize) {
        if num_blocks > 0 {
            let num_tokens = num_blocks * self.block_size();
            self.table.cut(self.table.num_tokens() - num_tokens);
            self.shared().counters.hit_tokens.subtract(num_tokens);
            self.note_found();
        }
    }

    /// Undo the opening of the last block for a step that is not taken.
    pub(crate) fn close_last(&self, opening: Option<Opening>) {
        self.table.close_last(opening, self.history.epoch);
    }

    fn note_found(&mut self) {
        self.history.num_computed = self.table.num_tokens();
        self.history.num_cached = self.table.num_tokens();
        self.history.num_published = self.table.blocks().len();
    }

    /// How many free blocks it takes to hold what the cache has and to compute the rest.
    pub(crate) fn blocks_needed(&mut self) -> usize {
        let found = self.look_again();
        let idle = found.iter().filter(|block| self.shared().is_idle(**block)).count();
        self.table.blocks_needed(self.num_unplanned(), &HashSet::new()) - found.len() + idle
    }

    /// The tokens up to `stop` are computed.
    pub(crate) fn compute_to(&mut self, stop: usize) {
        self.history.num_computed = stop;
        self.publish_full_blocks();
    }

    /// Hash the blocks that are full and known within the first `stop` tokens, if they are to be published;
    /// returns how many have had their turn then.
    pub(crate) fn describe_full_blocks(&mut self, stop: usize) -> usize {
        let history = &mut self.history;
        let shared = self.table.pool().shared();
        let (full, first) = (stop / shared.block_size, history.num_published);
        if full <= first || !history.write_cache || !shared.prefix_cache || history.epoch != shared.epoch() {
            return first;
        }
        let known = history.unknown.front().copied().unwrap_or(history.tokens.len());
        history.chain.extend(&history.tokens[..known], &history.extras, shared.block_size, full);
        full.min(history.chain.keys().len()).max(first)
    }

    /// Publish the blocks that are full, known and computed by now. Where an equal block is findable
    /// already, the sequence goes over to that one, and its own comes free.
    pub(crate) fn publish_full_blocks(&mut self) {
        let ready = self.describe_full_blocks(self.history.num_computed);
        let first = std::mem::replace(&mut self.history.num_published, ready);
        if ready == first {
            return;
        }
        let shared = self.table.pool().shared();
        let (history, blocks) = (&self.history, self.table.blocks());
        let (own, keys) = (&blocks[first..ready], &history.chain.keys()[first..ready]);
        let note = |part: Range<usize>| {
            let range = first + part.start..first + part.end;
            history.note(blocks, range, shared.block_size)
        };
        let note = shared.has_events().then_some(&note as &dyn Fn(Range<usize>) -> Note);
        let merged = shared.publish_noted(own, keys, history.epoch, note, history.read_cache);
        shared.counters.merges.add(merged.len());
        for (index, block) in merged {
            self.table.replace(first + index, block);
        }
    }

    // Getting memory at hand, see `BatchState::look_ahead`

    /// Read where the next tokens, keys and blocks go.
    pub(crate) fn touch(&self) {
        let history = &self.history;
        black_box(history.tokens.last().copied());
        black_box(history.chain.keys().last().map(|key| key.as_bytes()[0]));
        black_box(self.table.blocks().last().copied());
    }

    /// The blocks to be published next that are described, and where they will be looked for.
    pub(crate) fn unpublished(&self) -> impl Iterator<Item = Described> {
        let blocks =
            self.history.chain.keys().iter().zip(self.table.blocks()).skip(self.history.num_published);
        blocks.map(|(key, block)| self.shared().described(*block, key))
    }
}
