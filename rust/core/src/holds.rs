//! What plans in flight hold: blocks that were let go while a plan names them.
//!
//! A plan needs no claim on every block that it names: the sequences' own references protect those. Only
//! what a sequence lets go while a plan that names its blocks is in flight goes over to the plan, until the
//! plan ends. So a plan in flight costs nothing per block.

use std::collections::VecDeque;

use crate::{ids::BlockId, pool::BlockPool, sync::Mutex};

struct Flight {
    serial: u64,
    held: Vec<BlockId>,
}

/// The holds of one batch's plans in flight.
///
/// Its lock is held for a few instructions, and only when a block is let go in flight or a plan begins or
/// ends: sequences that left the batch let go from other threads.
pub(crate) struct Holds {
    pool: BlockPool,
    flights: Mutex<VecDeque<Flight>>,
}

impl Holds {
    pub(crate) fn new(pool: &BlockPool) -> Self {
        Self { pool: pool.clone(), flights: Mutex::new(VecDeque::new()) }
    }

    /// A plan takes off.
    pub(crate) fn begin(&self, serial: u64) {
        self.flights.lock().push_back(Flight { serial, held: Vec::new() });
    }

    /// The oldest plan lands; what it held is the caller's to drop.
    pub(crate) fn end(&self, serial: u64) -> Vec<BlockId> {
        let mut flights = self.flights.lock();
        debug_assert_eq!(flights.front().map(|flight| flight.serial), Some(serial));
        flights.pop_front().map_or_else(Vec::new, |flight| flight.held)
    }

    pub(crate) fn is_in_flight(&self, serial: u64) -> bool {
        self.flights.lock().iter().any(|flight| flight.serial == serial)
    }

    /// Let a plan hold references that are given back, the deepest block first; false if it has landed.
    pub(crate) fn take(&self, serial: u64, references: &[BlockId]) -> bool {
        let mut flights = self.flights.lock();
        let Some(flight) = flights.iter_mut().rev().find(|flight| flight.serial == serial) else {
            return false;
        };
        let start = flight.held.len();
        flight.held.extend(references.iter().rev().filter(|block| !block.is_null()));
        self.pool.shared().references_to_holds(&flight.held[start..]);
        true
    }
}
