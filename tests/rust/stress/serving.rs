//! Sequences with common prompts in a batch, run late, ended in all ways.

use std::{collections::VecDeque, sync::Arc};

use kvfolio::{Batch, BlockPool, Context, Error, NewTokens, Plan, PlanRequest, Result, Sequence};

use crate::{
    memory::{Memory, history, ids},
    random::Random,
};

const ROWS: usize = 4;
/// Room in the batch, and the length from which on a sequence ends.
const MOST_TOKENS: usize = 80;
const LONG: usize = 60;
const WAITING: usize = 6;

/// The beginning of one of a few documents that everybody knows, and a few tokens of its own.
pub(crate) fn prompt(random: &mut Random) -> Vec<i32> {
    let document = random.below(6) as i32;
    let length = 1 + random.below(40) as i32;
    let own = (0..random.below(3)).map(|_| random.below(2) as i32).collect::<Vec<_>>();
    (0..length).map(|position| position * (document + 1) % 17).chain(own).collect()
}

/// What a call may answer when blocks are short or a plan in flight needs things as they are.
fn tolerate<T>(result: Result<T>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(Error::OutOfBlocks { .. } | Error::PlanInFlight(_)) => None,
        Err(error) => panic!("{error}"),
    }
}

/// A plan, and what each of its rows is to hold when it was run.
struct Flight {
    plan: Plan,
    histories: Vec<Vec<u64>>,
    is_run: bool,
}

impl Flight {
    /// What a model would do: copy blocks, read all that came before, write what is new.
    fn run(&mut self, memory: &Memory) {
        if std::mem::replace(&mut self.is_run, true) {
            return;
        }
        let arrays = self.plan.arrays();
        arrays.copies().iter().for_each(|[source, target]| memory.copy_block(*source, *target));
        let (cells, _, stride) = arrays.block_table();
        for (row, history) in self.histories.iter().enumerate() {
            let new = arrays.query_start_loc()[row] as usize..arrays.query_start_loc()[row + 1] as usize;
            let start = history.len() - new.len();
            memory.check(cells[row * stride..][..stride].iter().copied(), &history[..start]);
            for (slot, content) in arrays.slot_mapping()[new].iter().zip(&history[start..]) {
                memory.write(*slot as usize, *content);
            }
        }
    }
}

pub(crate) struct Server<'a> {
    pool: &'a BlockPool,
    memory: &'a Memory,
    batch: Batch,
    running: [Option<Sequence>; ROWS],
    waiting: Vec<Sequence>,
    flights: VecDeque<Flight>,
    /// A plan was dropped that is taken back when those before it have ended.
    has_given_up: bool,
    random: Random,
}

impl<'a> Server<'a> {
    pub(crate) fn new(pool: &'a BlockPool, memory: &'a Memory, random: Random) -> Self {
        Self {
            pool,
            memory,
            batch: Batch::new(pool, ROWS, MOST_TOKENS).unwrap(),
            running: [const { None }; ROWS],
            waiting: Vec::new(),
            flights: VecDeque::new(),
            has_given_up: false,
            random,
        }
    }

    /// One thing that an engine does; returns the calls made.
    pub(crate) fn turn(&mut self) -> u64 {
        let row = self.random.below(ROWS);
        match (self.random.below(12), self.running[row].take()) {
            (0..4, None) => self.admit(),
            (0, Some(sequence)) => {
                drop(sequence); // and find it again by its row
                let sequence = self.batch.preempt(row).unwrap();
                self.wait(sequence);
            }
            (1, Some(sequence)) => {
                self.batch.remove(row).unwrap();
                self.wait(sequence);
            }
            (2, Some(sequence)) => {
                if let Some(fork) = tolerate(sequence.fork()) {
                    self.wait(fork);
                }
                self.running[row] = Some(sequence);
            }
            (3, Some(sequence)) => {
                let num_tokens = sequence.num_tokens().unwrap();
                match sequence.truncate(num_tokens - self.random.below(num_tokens.min(8))) {
                    Err(Error::Argument(_)) => {} // into what was discarded
                    result => drop(tolerate(result)),
                }
                self.running[row] = Some(sequence);
            }
            (4, Some(sequence)) => {
                let computed = sequence.num_computed().unwrap();
                tolerate(sequence.discard_before(computed / 2));
                self.running[row] = Some(sequence);
            }
            (5, Some(sequence)) => {
                if sequence.num_tokens().unwrap() < LONG {
                    let tokens = vec![self.random.below(2) as i32; 1 + self.random.below(3)];
                    tolerate(sequence.extend(NewTokens::Known(&tokens, &[])));
                }
                self.running[row] = Some(sequence);
            }
            (6..9, sequence) => {
                self.running[row] = sequence;
                self.plan();
            }
            (_, sequence) => {
                self.running[row] = sequence;
                self.end_one();
            }
        }
        2
    }

    fn wait(&mut self, sequence: Sequence) {
        if self.waiting.len() == WAITING {
            self.waiting.swap_remove(self.random.below(WAITING)).free().unwrap();
        }
        self.waiting.push(sequence);
    }

    fn admit(&mut self) {
        let sequence = if self.waiting.is_empty() || self.random.below(2) == 0 {
            let tokens = prompt(&mut self.random);
            self.pool.sequence(&tokens, &Context::default(), true, true).unwrap()
        } else {
            self.waiting.swap_remove(self.random.below(self.waiting.len()))
        };
        if sequence.num_tokens().unwrap() >= LONG {
            return;
        }
        let Some(row) = tolerate(self.batch.add(&sequence)) else {
            return self.wait(sequence);
        };
        // Whatever is said to be computed was so by somebody, or is about to be by a plan of this batch.
        if !self.flights.iter().any(|flight| !flight.is_run) {
            let computed = sequence.num_computed().unwrap();
            let contents = history(&sequence.token_ids().unwrap()[..computed]);
            self.memory.check(ids(&sequence.blocks().unwrap()), &contents);
        }
        self.running[row] = Some(sequence);
    }

    fn plan(&mut self) {
        let request = PlanRequest { partial: self.random.below(2) == 0, ..PlanRequest::default() };
        let Some(plan) = tolerate(self.batch.plan(&request)) else {
            // Somebody has to go: the last row that runs.
            if let Some((row, sequence)) =
                (0..ROWS).rev().find_map(|row| Some((row, self.running[row].take()?)))
            {
                self.batch.preempt(row).unwrap();
                self.wait(sequence);
            }
            return;
        };
        let arrays = Arc::clone(plan.arrays());
        let lengths = arrays.seq_lens().iter().map(|length| *length as usize);
        let histories = arrays.rows().iter().zip(lengths).map(|(row, length)| {
            let sequence = self.running[*row as usize].as_ref().unwrap();
            history(&sequence.token_ids().unwrap()[..length])
        });
        let histories = histories.collect();
        self.flights.push_back(Flight { plan, histories, is_run: false });
        while self.flights.len() > 3 {
            self.end_one();
        }
    }

    /// End the oldest plan, give up the newest, or run the next one ahead.
    fn end_one(&mut self) {
        match self.random.below(8) {
            0 => {
                // What is taken back takes rows of later plans with it; nobody may run those afterwards.
                self.run(usize::MAX);
                if let Some(flight) = self.flights.pop_front() {
                    flight.plan.rollback().unwrap();
                }
            }
            1 => {
                self.run(usize::MAX);
                self.flights.pop_back();
                self.has_given_up = !self.flights.is_empty();
            }
            2 => {
                let run = self.flights.iter().filter(|flight| flight.is_run).count();
                self.run(run + 1);
            }
            _ => {
                self.run(if self.has_given_up { usize::MAX } else { 1 });
                if let Some(flight) = self.flights.pop_front() {
                    self.commit(&flight.plan);
                }
                self.has_given_up &= !self.flights.is_empty();
            }
        }
    }

    /// Run the first plans, in their order.
    fn run(&mut self, most: usize) {
        self.flights.iter_mut().take(most).for_each(|flight| flight.run(self.memory));
    }

    fn commit(&mut self, plan: &Plan) {
        plan.commit(None).unwrap();
        if self.random.below(4) > 0 {
            let tokens: Vec<_> =
                plan.arrays().logits_rows().iter().map(|_| self.random.below(2) as i32).collect();
            plan.extend(&tokens).unwrap();
        }
        for row in 0..ROWS {
            let is_long = |sequence: &mut Sequence| sequence.num_tokens().unwrap() >= LONG;
            if let Some(sequence) = self.running[row].take_if(is_long) {
                sequence.free().unwrap();
            }
        }
    }
}
