//! What a decode step touches of a row.
//!
//! A row that takes one token a step changes little: counters, and the tokens of its newest block. They lie
//! in the row's *lane*, two cache lines, and the lanes of a batch lie side by side. While a lane is in use it
//! runs ahead of the [`SequenceState`] beneath it, which a step then touches only where a block begins or is
//! full. Whatever else is to be done with the sequence settles the lane first: what it ran ahead by is
//! written into the state, which is then all there is to know.
//!
//! A lane comes into use when a step has planned all of a row's tokens. From then on its steps are of one
//! token each, and plans end in the order they were made, so that two numbers and two bit sets stand for the
//! lists of steps that a state keeps: where a step of the lane stopped is `num_planned` less the steps since,
//! and whether it is in flight tells its plan's number alone. So a commit changes no lane.

use std::{ops::Range, sync::Arc};

use crate::{
    holds::Holds,
    ids::{BlockId, UNKNOWN_TOKEN},
    plan::Seen,
    sequence::{LaneStep, PlanId, SequenceState},
};

/// The plans of a batch, by number.
pub(super) struct Flights {
    pub(super) batch: u64,
    pub(super) holds: Arc<Holds>,
    /// Those in flight; the end is the next plan's number.
    pub(super) numbers: Range<u64>,
}

impl Flights {
    /// The next plan takes off.
    pub(super) fn begin(&mut self) -> PlanId {
        let id = self.id(self.numbers.end);
        self.numbers.end += 1;
        self.holds.begin(id.number);
        id
    }

    /// The oldest plan lands; returns the blocks that it held.
    pub(super) fn end(&mut self) -> Vec<BlockId> {
        let number = self.numbers.start;
        self.numbers.start += 1;
        self.holds.end(number)
    }

    pub(super) fn id(&self, number: u64) -> PlanId {
        PlanId { batch: self.batch, number }
    }

    /// Whether the plans up to this one have ended.
    fn have_landed(&self, number: u64) -> bool {
        number < self.numbers.start
    }
}

/// Plans that a lane remembers, the newest included: as many as it has bits for.
pub(super) const MOST_REMEMBERED: u64 = u32::BITS as u64;

/// Tokens that a lane keeps before they go into the state.
const MOST_RECENT: usize = 16;

/// No plan has this number.
const NOT_IN_USE: u64 = 0;

/// A step of one token.
pub(super) struct TokenStep {
    pub(super) token: i32,
    pub(super) position: u32,
    /// Where its K and V go.
    pub(super) block: BlockId,
    pub(super) offset: u32,
    /// What there is to see of the row's table.
    pub(super) seen: Seen,
}

#[derive(Default)]
#[repr(C, align(128))]
pub(super) struct Lane {
    /// The serial number of the sequence in the row, in use or not; 0 if there is none.
    pub(super) sequence: u64,
    /// The number of the plan that the newest step is of, or `NOT_IN_USE`.
    newest: u64,
    /// What was seen of the table beneath: its stamp, and how many blocks.
    stamp: u64,
    num_blocks: u32,
    /// Of the 32 plans up to the newest, the lowest bit, those in which the lane took a step.
    took: u32,
    /// Of those, the ones whose sampled token was not told yet.
    untold: u32,
    num_tokens: u32,
    num_planned: u32,
    last_block: BlockId,
    /// The last of the tokens.
    last_token: i32,
    /// Tokens in `recent`.
    num_recent: u32,
    /// `num_planned` when the lane came into use.
    entered_at: u32,
    /// The last of the tokens; those before them are in the state.
    recent: Recent,
}

/// A cache line of its own, since a step does not read it, and most of its time goes into waiting for what it
/// reads.
#[derive(Default)]
#[repr(align(64))]
struct Recent([i32; MOST_RECENT]);

impl Lane {
    /// Come into use, over a state all of whose tokens are planned.
    pub(super) fn enter(&mut self, state: &SequenceState, plan: u64) {
        let planned = state.table.num_tokens() as u32;
        self.newest = plan;
        (self.took, self.untold) = (0, 0);
        (self.num_tokens, self.num_planned) = (planned, planned);
        (self.entered_at, self.num_recent) = (planned, 0);
        self.look_at(state);
    }

    pub(super) fn in_use(&self) -> bool {
        self.newest != NOT_IN_USE
    }

    pub(super) fn num_tokens(&self) -> usize {
        self.num_tokens as usize
    }

    pub(super) fn num_pending(&self) -> u32 {
        self.num_tokens - self.num_planned
    }

    /// The block that the next step writes into, unless it begins a new one.
    pub(super) fn open_block(&self, block_size: u32) -> Option<BlockId> {
        (self.num_planned < self.num_blocks * block_size).then_some(self.last_block)
    }

    /// What there is to see of the table, and its last block.
    pub(super) fn seen(&self) -> (Seen, BlockId) {
        (Seen { stamp: self.stamp, len: self.num_blocks }, self.last_block)
    }

    pub(super) fn num_blocks(&self) -> usize {
        self.num_blocks as usize
    }

    #[inline]
    fn bit(&self, plan: u64) -> u32 {
        // Of a newer plan, or of one too old to be remembered, no bit.
        self.newest.checked_sub(plan).and_then(|age| 1_u32.checked_shl(age as u32)).unwrap_or(0)
    }

    /// Whether the lane took a step in this plan, and knows of it.
    pub(super) fn took(&self, plan: u64) -> bool {
        self.took & self.bit(plan) != 0
    }

    /// Whether the bit sets can go on to the next plan and lose no step that is in flight or that a token
    /// may be told for; `kept` is the oldest plan that has a handle.
    pub(super) fn remembers_enough(&self, flights: &Flights, kept: u64) -> bool {
        let ahead = (flights.numbers.end - self.newest).min(32) as u32;
        let lost = !low_bits(32 - ahead);
        let newest_lost = self.newest.saturating_sub(u64::from(32 - ahead));
        (self.took & lost == 0 || flights.have_landed(newest_lost))
            && (self.untold & lost == 0 || newest_lost < kept)
    }

    /// A block for the next steps, where the last one has no room.
    pub(super) fn begin_block(&mut self, block: BlockId) {
        self.last_block = block;
        self.num_blocks += 1;
    }

    /// The one pending token goes into a plan, where there is room.
    #[inline]
    pub(super) fn step(&mut self, plan: u64, block_size: u32) -> TokenStep {
        let ahead = (plan - self.newest).min(32) as u32;
        // Shifted as 64 bits, since it may be by 32.
        self.took = (u64::from(self.took) << ahead) as u32 | 1;
        self.untold = (u64::from(self.untold) << ahead) as u32 | 1;
        self.newest = plan;
        let stepped = TokenStep {
            token: self.last_token,
            position: self.num_planned,
            block: self.last_block,
            offset: self.num_planned - (self.num_blocks - 1) * block_size,
            seen: self.seen().0,
        };
        self.num_planned += 1;
        stepped
    }

    /// Whether the token that this plan sampled was not told yet.
    pub(super) fn is_untold(&self, plan: u64) -> bool {
        self.untold & self.bit(plan) != 0
    }

    pub(super) fn note_told(&mut self, plan: u64) {
        self.untold &= !self.bit(plan);
    }

    /// The common case of a token that was sampled: the step of this plan is the lane's newest, nothing was
    /// told of it yet, and the token goes behind it. False if it is not so, and nothing was done.
    ///
    /// No later sequence of the row has this number for its newest plan.
    #[inline]
    pub(super) fn append_sampled(&mut self, plan: u64, token: i32) -> bool {
        let usual = self.newest == plan && self.untold & 1 != 0 && self.num_pending() == 0;
        if !usual || self.is_full() {
            return false;
        }
        self.untold &= !1;
        self.push(token);
        true
    }

    /// Whether the next token has to wait until recent ones have gone into the state.
    pub(super) fn is_full(&self) -> bool {
        self.num_recent as usize == MOST_RECENT
    }

    /// Append a token to a lane that is not full.
    #[inline]
    pub(super) fn push(&mut self, token: i32) {
        self.recent.0[self.num_recent as usize] = token;
        self.num_recent += 1;
        self.last_token = token;
        self.num_tokens += 1;
    }

    /// Tell a token that is not known yet; false if there is none at `position`.
    pub(super) fn resolve(&mut self, position: usize, token: i32) -> bool {
        let num_tokens = self.num_tokens();
        let recent = &mut self.recent.0[..self.num_recent as usize];
        let index = position.checked_sub(num_tokens - recent.len());
        let Some(place) = index.and_then(|index| recent.get_mut(index)) else { return false };
        if *place != UNKNOWN_TOKEN {
            return false;
        }
        *place = token;
        if position + 1 == num_tokens {
            self.last_token = token;
        }
        true
    }

    /// Move the tokens before `stop` into the state; false if one of them is unknown, and nothing is moved.
    pub(super) fn flush(&mut self, state: &mut SequenceState, stop: usize) -> bool {
        let num_tokens = self.num_tokens();
        let recent = &mut self.recent.0[..self.num_recent as usize];
        let count = stop.saturating_sub(num_tokens - recent.len());
        let known = !recent[..count].contains(&UNKNOWN_TOKEN);
        if known {
            state.push_all_known(&recent[..count]);
            recent.copy_within(count.., 0);
            self.num_recent -= count as u32;
        }
        known
    }

    /// The state beneath goes over to other blocks, or is about to let some go.
    pub(super) fn fly(&self, state: &mut SequenceState, flights: &Flights) {
        state.table.fly(&flights.holds, self.newest);
    }

    /// The state's table has changed.
    pub(super) fn look_at(&mut self, state: &SequenceState) {
        let Seen { stamp, len } = Seen::now(&state.table);
        (self.stamp, self.num_blocks) = (stamp, len);
        self.last_block = state.table.blocks().last().copied().unwrap_or(BlockId::NULL);
    }

    /// Go out of use: the state knows everything then. True if it took over steps in flight.
    pub(super) fn settle(&mut self, state: &mut SequenceState, flights: &Flights) -> bool {
        let newest = std::mem::take(&mut self.newest);
        if newest == NOT_IN_USE {
            return false;
        }
        state.push_all(&self.recent.0[..self.num_recent as usize]);
        let num_steps = self.num_planned - self.entered_at;
        if num_steps == 0 {
            return false;
        }
        state.table.fly(&flights.holds, newest);
        let ages_in_flight = (newest + 1).saturating_sub(flights.numbers.start).min(32) as u32;
        let in_flight = self.took & low_bits(ages_in_flight);
        let num_in_flight = in_flight.count_ones();
        let computed = (num_steps > num_in_flight).then_some((self.num_planned - num_in_flight) as usize);
        let step_of = |age: u32| {
            let bit = 1 << age;
            let stop = self.num_planned - (self.took & (bit - 1)).count_ones();
            LaneStep {
                plan: flights.id(newest - u64::from(age)),
                stop: stop as usize,
                in_flight: in_flight & bit != 0,
                told: self.untold & bit == 0,
            }
        };
        let open = in_flight | self.untold;
        let steps = (0..32).rev().filter(|age| open & (1 << age) != 0).map(step_of);
        state.take_over(self.num_planned as usize, computed, steps);
        num_in_flight > 0
    }
}

/// A set of the lowest `n` bits, at most 32.
fn low_bits(n: u32) -> u32 {
    !u32::MAX.checked_shl(n).unwrap_or(0)
}
