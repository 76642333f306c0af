//! Which rows take how many tokens in the next step, and the free blocks that takes. Nothing is changed.

use std::collections::HashSet;

use super::{BatchState, lanes::MOST_REMEMBERED};
use crate::{
    error::{Error, Result},
    ids::BlockId,
    plan::Extent,
};

/// The most tokens that a row takes.
#[derive(Clone, Copy, Debug, Default)]
pub enum TokenCaps<'a> {
    /// All that are pending.
    #[default]
    None,
    /// The same number for every row.
    Same(usize),
    /// A number for each of the rows that were named.
    Each(&'a [usize]),
}

/// What a plan is to serve.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlanRequest<'a> {
    /// The most tokens of all rows together, at least 1.
    pub max_tokens: Option<usize>,
    /// Serve the rows that fit and skip the others, instead of all or nothing.
    pub partial: bool,
    /// The rows, in the order they are served; by default all, in admission order.
    pub rows: Option<&'a [usize]>,
    /// The most tokens of each row.
    pub num_tokens: TokenCaps<'a>,
}

/// What one row is to take.
#[derive(Clone, Copy)]
pub(super) struct Chosen {
    pub(super) row: u32,
    pub(super) count: u32,
    pub(super) how: How,
}

/// How a row takes its tokens.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// The row's lane takes the one pending token, into an open block or a new one.
    Lane,
    /// The state first holds so many blocks that were found in the cache.
    State { num_found: u32 },
}

/// Lists that are kept from plan to plan for their memory.
#[derive(Default)]
pub(super) struct Choice {
    pub(super) steps: Vec<Chosen>,
    /// What the steps found, one after the other.
    pub(super) found: Vec<BlockId>,
    pub(super) extent: Extent,
    pub(super) needed: usize,
    pub(super) needed_by_lanes: usize,
    pub(super) skipped: Vec<i32>,
    /// Of the skipped ones.
    pub(super) never_fit: Vec<i32>,
    /// Whether every row's share alone would fit the pool.
    pub(super) ever_fits: bool,
    /// Stands for the rows, if they are all that there are, in admission order.
    pub(super) roster: Option<u64>,
    /// Steps that are not of a lane.
    num_states: usize,
    candidates: Vec<Candidate>,
    candidates_found: Vec<BlockId>,
}

/// A row that may take part, and how much of `candidates_found` is its own.
struct Candidate {
    row: usize,
    cap: usize,
    how: How,
}

impl Choice {
    fn clear(&mut self) {
        self.steps.clear();
        self.found.clear();
        self.extent = Extent::default();
        self.needed = 0;
        self.needed_by_lanes = 0;
        self.roster = None;
        self.num_states = 0;
        self.skipped.clear();
        self.never_fit.clear();
        self.ever_fits = true;
    }

    /// Row, number of tokens, and number of blocks found, of those that do not use their lane.
    pub(super) fn state_steps(&self) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        let steps = if self.num_states == 0 { &[] } else { &self.steps[..] };
        steps.iter().filter_map(|step| match step.how {
            How::Lane => None,
            How::State { num_found } => Some((step.row as usize, step.count as usize, num_found as usize)),
        })
    }

    fn push(&mut self, chosen: Chosen, num_blocks: usize) {
        self.extent.num_rows += 1;
        self.extent.num_tokens += chosen.count as usize;
        self.extent.width = self.extent.width.max(num_blocks);
        self.num_states += usize::from(chosen.how != How::Lane);
        self.steps.push(chosen);
    }
}

impl BatchState {
    /// Fill `choice`.
    pub(super) fn choose(&mut self, request: &PlanRequest<'_>, choice: &mut Choice) -> Result<()> {
        if request.max_tokens == Some(0) {
            return Err(Error::argument("max_tokens", "at least 1", 0));
        }
        if self.choose_lanes(request, choice) {
            return Ok(());
        }
        self.find_candidates(request, choice)?;
        let mut claimed: HashSet<_> = choice.candidates_found.iter().copied().collect();
        if !request.partial && !claimed.is_empty() {
            // What a row is to find is known without knowing what copies cost.
            self.choose_among(request, &claimed, choice);
            claimed = choice.found.iter().copied().collect();
        }
        self.choose_among(request, &claimed, choice);
        Ok(())
    }

    fn find_candidates(&mut self, request: &PlanRequest<'_>, choice: &mut Choice) -> Result<()> {
        choice.candidates.clear();
        choice.candidates_found.clear();
        if let Some(rows) = request.rows {
            self.rows.check_distinct(rows)?;
        }
        let num_rows = request.rows.unwrap_or(self.rows.in_order()).len();
        if let TokenCaps::Each(caps) = request.num_tokens
            && caps.len() != num_rows
        {
            let allowed = format!("one number, or one per row, {num_rows} in all");
            return Err(Error::argument("num_tokens", allowed, format_args!("{} numbers", caps.len())));
        }
        let kept = self.oldest_remembered();
        for index in 0..num_rows {
            let row = request.rows.map_or_else(|| self.rows.in_order()[index], |rows| rows[index]);
            let cap = match request.num_tokens {
                TokenCaps::None => usize::MAX,
                TokenCaps::Same(cap) => cap,
                TokenCaps::Each(caps) => caps[index],
            };
            let how = if self.can_use_lane(row, kept) {
                How::Lane
            } else {
                let found = self.rows.chosen(row).look_again();
                choice.candidates_found.extend_from_slice(&found);
                How::State { num_found: found.len() as u32 }
            };
            choice.candidates.push(Candidate { row, cap, how });
        }
        Ok(())
    }

    /// The common case: all rows of the batch have one pending token or none, and there are blocks enough.
    /// False if it is not so, and then nothing was chosen.
    fn choose_lanes(&mut self, request: &PlanRequest<'_>, choice: &mut Choice) -> bool {
        let unlimited = matches!(request.num_tokens, TokenCaps::None | TokenCaps::Same(1..));
        if request.rows.is_some() || !unlimited || self.oldest_remembered().is_some() {
            return false;
        }
        choice.clear();
        let (shared, lanes) = (self.pool.shared(), self.rows.lanes());
        let block_size = shared.block_size as u32;
        let (mut needed, mut width) = (0, 0);
        for &row in self.rows.in_order() {
            let lane = &lanes[row];
            match lane.num_pending() {
                1 if lane.in_use() => {}
                0 if lane.in_use() => continue,
                _ => return false,
            }
            let open_block = lane.open_block(block_size);
            if open_block.is_some_and(|block| shared.is_shared(block)) {
                return false;
            }
            let begins = usize::from(open_block.is_none());
            needed += begins;
            width = width.max(lane.num_blocks() + begins);
            choice.steps.push(Chosen { row: row as u32, count: 1, how: How::Lane });
        }
        let count = choice.steps.len();
        let fits = needed <= shared.num_free() && width <= shared.num_blocks;
        if fits && count <= request.max_tokens.unwrap_or(usize::MAX) {
            (choice.needed, choice.needed_by_lanes) = (needed, needed);
            choice.extent = Extent { num_rows: count, num_tokens: count, width };
            choice.roster = (count == self.rows.in_order().len()).then(|| self.rows.roster());
            return true;
        }
        false
    }

    /// If the next step of a lane could make it forget something: which plans it must not forget to be told
    /// of; none if there is no such danger for any.
    fn oldest_remembered(&self) -> Option<u64> {
        let kept = self.plans.oldest_with_handle().unwrap_or(u64::MAX);
        let numbers = &self.rows.flights.numbers;
        (kept.min(numbers.start) + MOST_REMEMBERED <= numbers.end).then_some(kept)
    }

    /// Whether a row has nothing to plan, or one token that goes into an open block of its own or a new one.
    fn can_use_lane(&mut self, row: usize, kept: Option<u64>) -> bool {
        let block_size = self.pool.block_size() as u32;
        let (lane, _, flights) = self.rows.lane_and_state(row);
        lane.in_use()
            && lane.num_pending() <= 1
            && lane.open_block(block_size).is_none_or(|block| !self.pool.shared().is_shared(block))
            && kept.is_none_or(|kept| lane.remembers_enough(flights, kept))
    }

    /// `all_claimed` are blocks that rows of this plan are to find: who writes into one has to copy it.
    fn choose_among(
        &mut self,
        request: &PlanRequest<'_>,
        all_claimed: &HashSet<BlockId>,
        choice: &mut Choice,
    ) {
        choice.clear();
        let num_free = self.pool.num_free();
        let mut claimed = HashSet::<BlockId>::new();
        let mut budget = request.max_tokens.unwrap_or(usize::MAX);
        let candidates = std::mem::take(&mut choice.candidates);
        let candidates_found = std::mem::take(&mut choice.candidates_found);
        let mut all_found = &candidates_found[..];
        for &Candidate { row, cap, how } in &candidates {
            let most = cap.min(budget);
            let (found, share) = match how {
                How::Lane => (&all_found[..0], self.lane_share(row, most)),
                How::State { num_found } => {
                    let (found, rest) = all_found.split_at(num_found as usize);
                    all_found = rest;
                    (found, self.state_share(row, most, found, all_claimed, &claimed))
                }
            };
            let Some(share) = share else { continue };
            if request.partial && choice.needed + share.needed > num_free {
                choice.skipped.push(row as i32);
                choice.never_fit.extend((!share.ever_fits).then_some(row as i32));
                continue;
            }
            if !found.is_empty() {
                claimed.extend(found);
            }
            choice.found.extend_from_slice(found);
            choice.needed += share.needed;
            choice.needed_by_lanes += if how == How::Lane { share.needed } else { 0 };
            choice.ever_fits &= share.ever_fits;
            let (row, count) = (row as u32, share.count as u32);
            choice.push(Chosen { row, count, how }, share.num_blocks);
            budget -= share.count;
        }
        (choice.candidates, choice.candidates_found) = (candidates, candidates_found);
    }

    fn lane_share(&mut self, row: usize, most: usize) -> Option<Share> {
        let block_size = self.pool.block_size() as u32;
        let lane = self.rows.lane(row);
        if most == 0 || lane.num_pending() == 0 {
            return None;
        }
        let needed = usize::from(lane.open_block(block_size).is_none());
        let num_blocks = lane.num_blocks() + needed;
        // A table without discarded blocks that is no larger than the pool fits it; others have to be asked.
        let ever_fits = num_blocks <= self.pool.num_blocks()
            || self.rows.lane_and_state(row).1.table.ever_fits(num_blocks);
        Some(Share { count: 1, needed, num_blocks, ever_fits })
    }

    fn state_share(
        &mut self,
        row: usize,
        most: usize,
        found: &[BlockId],
        all_claimed: &HashSet<BlockId>,
        claimed: &HashSet<BlockId>,
    ) -> Option<Share> {
        let shared = self.pool.shared();
        let state = self.rows.chosen(row);
        let num_found = found.len() * shared.block_size;
        let count = (state.num_unplanned() - num_found).min(most);
        if count == 0 {
            return None;
        }
        let total = count + num_found;
        let idle = |block: &&BlockId| !claimed.contains(*block) && shared.is_idle(**block);
        Some(Share {
            count,
            needed: state.table.blocks_needed(total, all_claimed) - found.len()
                + found.iter().filter(idle).count(),
            num_blocks: state.table.num_blocks_with(total),
            ever_fits: state.table.ever_fits(state.table.num_blocks_with(total)),
        })
    }
}

/// What a row would take.
struct Share {
    count: usize,
    /// Free blocks.
    needed: usize,
    /// Blocks in its table then.
    num_blocks: usize,
    ever_fits: bool,
}
