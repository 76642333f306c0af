//! The plans that are in flight or have a handle, by number.

use std::sync::Arc;

use crate::plan::{PlanLists, PlanShared};

#[derive(Default)]
pub(super) struct Plans {
    /// Sorted by number.
    known: Vec<Arc<PlanShared>>,
    /// Memory of those that ended and have no handle any more.
    spare: Vec<Arc<PlanShared>>,
}

impl Plans {
    /// A plan in flight or with a handle.
    pub(super) fn get(&self, number: u64) -> Option<&Arc<PlanShared>> {
        // Most often it is one of very few.
        let index = self.known.binary_search_by_key(&number, |plan| plan.id.number).ok()?;
        Some(&self.known[index])
    }

    pub(super) fn has_handle(&self, number: u64) -> bool {
        self.get(number).is_some_and(|plan| plan.has_handle())
    }

    /// The number of the oldest plan that has a handle.
    pub(super) fn oldest_with_handle(&self) -> Option<u64> {
        self.known.iter().find(|plan| plan.has_handle()).map(|plan| plan.id.number)
    }

    /// Memory for the next plan.
    pub(super) fn recycle(&mut self) -> (Option<Arc<PlanShared>>, PlanLists) {
        self.forget_ended();
        let mut memory = self.spare.pop();
        let mut lists = PlanLists::default();
        if let Some(plan) = memory.as_mut().and_then(Arc::get_mut) {
            (lists.steps, lists.to_commit) =
                (std::mem::take(&mut plan.steps), std::mem::take(&mut plan.to_commit));
            lists.steps.clear();
            lists.to_commit.clear();
        }
        (memory, lists)
    }

    pub(super) fn push(&mut self, memory: Option<Arc<PlanShared>>, plan: PlanShared) -> Arc<PlanShared> {
        let plan = match memory {
            Some(mut memory) => {
                // Nobody else has it, or it would not be spare.
                if let Some(there) = Arc::get_mut(&mut memory) {
                    *there = plan;
                }
                memory
            }
            None => Arc::new(plan),
        };
        self.known.push(Arc::clone(&plan));
        plan
    }

    /// Forget the plans that nobody can come back to.
    pub(super) fn forget_ended(&mut self) {
        let spare = &mut self.spare;
        self.known.retain_mut(|plan| {
            let keep = plan.has_handle() || plan.is_in_flight();
            if !keep && Arc::get_mut(plan).is_some() {
                spare.push(Arc::clone(plan));
            }
            keep
        });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }
}
