//! Which rows take how many tokens in the next step, and the free blocks that takes. Nothing is changed.

use std::collections::HashSet;

use super::BatchState;
use crate::{
    error::{Error, Result},
    ids::BlockId,
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

/// What one row is to take: blocks found in the cache, then `count` tokens to compute.
pub(super) struct Chosen {
    pub(super) row: usize,
    pub(super) count: usize,
    pub(super) found: Vec<BlockId>,
}

#[derive(Default)]
pub(super) struct Choice {
    pub(super) steps: Vec<Chosen>,
    pub(super) needed: usize,
    pub(super) skipped: Vec<i32>,
    /// Of the skipped ones.
    pub(super) never_fit: Vec<i32>,
    /// Whether every row's share alone would fit the pool.
    pub(super) ever_fits: bool,
}

/// A row that may take part, and what the cache has for it.
struct Candidate {
    row: usize,
    cap: usize,
    found: Vec<BlockId>,
}

impl BatchState {
    pub(super) fn choose(&mut self, request: &PlanRequest<'_>) -> Result<Choice> {
        if request.max_tokens == Some(0) {
            return Err(Error::argument("max_tokens", "at least 1", 0));
        }
        let candidates = self.candidates(request)?;
        let found = candidates.iter().flat_map(|candidate| &candidate.found);
        let mut claimed: HashSet<_> = found.copied().collect();
        if !request.partial && !claimed.is_empty() {
            // What a row is to find is known without knowing what copies cost.
            let choice = self.choose_among(&candidates, request, &claimed)?;
            claimed = choice.steps.iter().flat_map(|step| &step.found).copied().collect();
        }
        self.choose_among(&candidates, request, &claimed)
    }

    fn candidates(&mut self, request: &PlanRequest<'_>) -> Result<Vec<Candidate>> {
        let rows = match request.rows {
            None => self.rows.in_order().to_vec(),
            Some(rows) => {
                self.rows.check_distinct(rows)?;
                rows.to_vec()
            }
        };
        if let TokenCaps::Each(caps) = request.num_tokens
            && caps.len() != rows.len()
        {
            let allowed = format!("one number, or one per row, {} in all", rows.len());
            return Err(Error::argument("num_tokens", allowed, format_args!("{} numbers", caps.len())));
        }
        let cap = |index: usize| match request.num_tokens {
            TokenCaps::None => usize::MAX,
            TokenCaps::Same(cap) => cap,
            TokenCaps::Each(caps) => caps[index],
        };
        let with_found = |(index, row): (usize, usize)| {
            Ok(Candidate { row, cap: cap(index), found: self.rows.state(row)?.look_again() })
        };
        rows.into_iter().enumerate().map(with_found).collect()
    }

    /// `all_claimed` are blocks that rows of this plan are to find: who writes into one has to copy it.
    fn choose_among(
        &mut self,
        candidates: &[Candidate],
        request: &PlanRequest<'_>,
        all_claimed: &HashSet<BlockId>,
    ) -> Result<Choice> {
        let block_size = self.pool.block_size();
        let num_free = self.pool.num_free();
        let mut choice = Choice { ever_fits: true, ..Choice::default() };
        let mut claimed = HashSet::<BlockId>::new();
        let mut budget = request.max_tokens.unwrap_or(usize::MAX);
        for Candidate { row, cap, found } in candidates {
            let state = self.rows.state(*row)?;
            let num_found = found.len() * block_size;
            let count = (state.num_unplanned() - num_found).min(*cap).min(budget);
            if count == 0 {
                continue;
            }
            let total = count + num_found;
            let ever_fits = state.table.ever_fits(total);
            let idle = |block: &&BlockId| !claimed.contains(*block) && self.pool.shared().is_idle(**block);
            let needed = state.table.blocks_needed(total, all_claimed) - found.len()
                + found.iter().filter(idle).count();
            if request.partial && choice.needed + needed > num_free {
                choice.skipped.push(*row as i32);
                choice.never_fit.extend((!ever_fits).then_some(*row as i32));
                continue;
            }
            claimed.extend(found);
            choice.needed += needed;
            choice.ever_fits &= ever_fits;
            choice.steps.push(Chosen { row: *row, count, found: found.clone() });
            budget -= count;
        }
        Ok(choice)
    }
}
