//! Which blocks a follower knows: a tree by parents, in which only what hangs together from its root is told.
//!
//! A node is one key. Nodes also stand for keys that no copy is left of, while there are children of theirs: those
//! are not told then, and are again as soon as their parent is.

use std::{collections::HashMap, sync::Arc};

use super::events::StoredBlock;
use crate::key::Key;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NodeId(u32);

const ROOT: NodeId = NodeId(0);

struct Node {
    key: Key,
    /// Of the last copy that was added; none for the root, and where no copy is left.
    stored: Option<Arc<StoredBlock>>,
    copies: usize,
    is_told: bool,
    /// None if nobody has said yet.
    parent: Option<NodeId>,
    first_child: Option<NodeId>,
    previous: Option<NodeId>,
    next: Option<NodeId>,
}

impl Node {
    fn new(key: Key) -> Self {
        Self {
            key,
            stored: None,
            copies: 0,
            is_told: false,
            parent: None,
            first_child: None,
            previous: None,
            next: None,
        }
    }
}

pub(super) struct Tree {
    nodes: Vec<Node>,
    free: Vec<NodeId>,
    by_key: HashMap<Key, NodeId>,
    /// Nodes whose copies changed.
    touched: Vec<NodeId>,
}

impl Tree {
    pub(super) fn new() -> Self {
        let root = Node { is_told: true, ..Node::new(Key::from_words([0; 4])) };
        Self { nodes: vec![root], free: Vec::new(), by_key: HashMap::new(), touched: Vec::new() }
    }

    fn at(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0 as usize]
    }

    fn get(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    fn find_or_make(&mut self, key: Key) -> NodeId {
        if let Some(id) = self.by_key.get(&key) {
            return *id;
        }
        let id = self.free.pop().unwrap_or(NodeId(self.nodes.len() as u32));
        if id.0 as usize == self.nodes.len() {
            self.nodes.push(Node::new(key));
        } else {
            *self.at(id) = Node::new(key);
        }
        self.by_key.insert(key, id);
        id
    }

    /// There is one more copy of a block.
    pub(super) fn add_copy(&mut self, stored: &Arc<StoredBlock>) -> NodeId {
        let id = self.find_or_make(stored.key);
        if self.get(id).parent.is_none() {
            let parent = stored.parent.map_or(ROOT, |parent| self.find_or_make(parent));
            self.hang(id, parent);
        }
        let node = self.at(id);
        node.stored = Some(Arc::clone(stored));
        node.copies += 1;
        self.touched.push(id);
        id
    }

    /// There is one copy less.
    pub(super) fn remove_copy(&mut self, id: NodeId) {
        self.at(id).copies -= 1;
        self.touched.push(id);
    }

    /// What is to be told of the copies that came and went: what is not there any more, children first, and what is
    /// there now, parents first.
    pub(super) fn settle(&mut self) -> (Vec<Key>, Vec<Arc<StoredBlock>>) {
        let touched = std::mem::take(&mut self.touched);
        let mut removed = Vec::new();
        for &id in &touched {
            if self.get(id).is_told && self.get(id).copies == 0 {
                let start = removed.len();
                self.walk(id, |tree, id| {
                    let was_told = std::mem::replace(&mut tree.at(id).is_told, false);
                    if was_told {
                        removed.push(tree.get(id).key);
                    }
                    was_told
                });
                removed[start..].reverse(); // parents came first
            }
        }
        let mut stored = Vec::new();
        for &id in &touched {
            let parent = self.get(id).parent;
            if parent.is_some_and(|parent| self.get(parent).is_told) {
                self.walk(id, |tree, id| {
                    let node = tree.at(id);
                    let is_new = node.copies > 0 && !std::mem::replace(&mut node.is_told, true);
                    if is_new {
                        stored.extend(node.stored.clone());
                    }
                    is_new
                });
            }
        }
        for id in touched {
            self.drop_empty(id);
        }
        (removed, stored)
    }

    /// A new follower knows nothing.
    pub(super) fn forget_told(&mut self) {
        let ids = (0..self.nodes.len() as u32).map(NodeId);
        for id in ids.filter(|id| *id != ROOT) {
            self.at(id).is_told = false;
            if self.get(id).parent == Some(ROOT) {
                self.touched.push(id);
            }
        }
    }

    /// All that is told, parents first.
    pub(super) fn all_told(&mut self) -> Vec<Arc<StoredBlock>> {
        let mut stored = Vec::new();
        self.walk(ROOT, |tree, id| {
            let node = tree.get(id);
            stored.extend(node.stored.clone().filter(|_| node.is_told));
            node.is_told
        });
        stored
    }

    /// Visit a node and, for as long as `visit` says so, the children of what was visited; a chain is not interrupted.
    fn walk(&mut self, top: NodeId, mut visit: impl FnMut(&mut Self, NodeId) -> bool) {
        let mut rest = vec![top];
        while let Some(id) = rest.pop() {
            if visit(self, id) {
                let mut child = self.get(id).first_child;
                while let Some(id) = child {
                    rest.push(id);
                    child = self.get(id).next;
                }
            }
        }
    }

    fn hang(&mut self, id: NodeId, parent: NodeId) {
        let first = self.at(parent).first_child.replace(id);
        if let Some(first) = first {
            self.at(first).previous = Some(id);
        }
        let node = self.at(id);
        (node.parent, node.next) = (Some(parent), first);
    }

    /// Forget a node that stands for nothing any more, and its parents if they only stood for it.
    fn drop_empty(&mut self, mut id: NodeId) {
        loop {
            let node = self.at(id);
            if id == ROOT || node.copies > 0 {
                return;
            }
            node.stored = None;
            let (key, parent, previous, next) = (node.key, node.parent, node.previous, node.next);
            // Without children, and not gone already.
            if node.first_child.is_some() || self.by_key.get(&key) != Some(&id) {
                return;
            }
            self.by_key.remove(&key);
            self.free.push(id);
            if let Some(next) = next {
                self.at(next).previous = previous;
            }
            match (previous, parent) {
                (Some(previous), _) => self.at(previous).next = next,
                (None, Some(parent)) => self.at(parent).first_child = next,
                (None, None) => {}
            }
            let Some(parent) = parent else { return };
            id = parent;
        }
    }

    /// Nodes besides the root, also those that only stand for something.
    #[cfg(all(test, not(any(loom, schedules))))]
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }
}

#[cfg(all(test, not(any(loom, schedules))))]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    /// Of twelve nodes in a heap: node `n` has the parent `n / 2`, node 1 none.
    const NUM_NODES: u64 = 12;

    fn key(number: u64) -> Key {
        Key::from_words([number; 4])
    }

    fn stored(number: u64) -> Arc<StoredBlock> {
        Arc::new(StoredBlock::of_test(key(number), (number > 1).then(|| key(number / 2))))
    }

    /// What a follower knows, who insists on the order.
    fn follow(known: &mut HashSet<u64>, (removed, stored): (Vec<Key>, Vec<Arc<StoredBlock>>)) {
        for number in removed.iter().map(|key| key.words()[0]) {
            assert!(known.remove(&number), "{number} was not there");
            assert!(!known.contains(&(2 * number)) && !known.contains(&(2 * number + 1)), "children first");
        }
        for number in stored.iter().map(|block| block.key.words()[0]) {
            assert!(known.insert(number), "{number} was there");
            assert!(number == 1 || known.contains(&(number / 2)), "parents first");
        }
    }

    #[test]
    fn what_is_told_is_what_hangs_together_whatever_comes_and_goes() {
        let mut random = 1_u64;
        let mut below = move |n: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % n
        };
        let (mut tree, mut known) = (Tree::new(), HashSet::new());
        let mut copies: HashMap<u64, Vec<NodeId>> = HashMap::new();
        for round in 0..20_000 {
            for _ in 0..below(6) {
                let number = 1 + below(NUM_NODES);
                let own = copies.entry(number).or_default();
                if below(2) == 0 && own.len() < 3 {
                    own.push(tree.add_copy(&stored(number)));
                } else if let Some(id) = own.pop() {
                    tree.remove_copy(id);
                }
            }
            if round % 500 == 499 {
                tree.forget_told();
                known.clear();
            }
            let told = tree.settle();
            follow(&mut known, told);
            let is_there = |number: &u64| copies.get(number).is_some_and(|own| !own.is_empty());
            let hangs_together = |number: &u64| {
                std::iter::successors(Some(*number), |number| Some(number / 2))
                    .take_while(|number| *number > 0)
                    .all(|number| is_there(&number))
            };
            assert_eq!(known, (1..=NUM_NODES).filter(hangs_together).collect());
            let mut late = HashSet::new();
            follow(&mut late, (Vec::new(), tree.all_told()));
            assert_eq!(late, known);
            // Nodes that stand for nothing do not stay.
            let needed: HashSet<_> = (1..=NUM_NODES)
                .filter(is_there)
                .flat_map(|number| [number, number / 2])
                .filter(|number| *number > 0)
                .collect();
            assert!(tree.len() >= needed.len());
            if needed.is_empty() {
                assert_eq!(tree.len(), 0);
            }
        }
        for own in copies.into_values().flatten() {
            tree.remove_copy(own);
        }
        follow(&mut known, tree.settle());
        assert!(known.is_empty());
        assert_eq!(tree.len(), 0);
    }
}
