//! Events as vLLM's `EventBatch` in `MessagePack`: `[seconds, [event, ...], data_parallel_rank]`.
//!
//! An event is a map whose "type" is its name, or, as it was in earlier versions and is elsewhere, an array that begins
//! with it. Encoded here and not in Python, so that no step waits for the interpreter meanwhile.

use std::{
    convert::Infallible,
    fmt::Write,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use kvfolio::{Event, Key, StoredBlock};
use rmp::encode::{self, ByteBuf, ValueWriteError};

/// What the events say besides themselves.
pub(crate) struct Form {
    pub(crate) medium: String,
    pub(crate) rank: u64,
    pub(crate) array_events: bool,
}

/// A message in the making. Nothing that is written into memory can fail.
struct Message(ByteBuf);

type Written<T> = Result<T, ValueWriteError<Infallible>>;

impl Message {
    fn array(&mut self, len: usize) {
        let Ok(_): Written<_> = encode::write_array_len(&mut self.0, len as u32);
    }

    fn map(&mut self, len: usize) {
        let Ok(_): Written<_> = encode::write_map_len(&mut self.0, len as u32);
    }

    fn text(&mut self, text: &str) {
        let Ok(()): Written<_> = encode::write_str(&mut self.0, text);
    }

    fn number(&mut self, number: i64) {
        let Ok(_): Written<_> = encode::write_sint(&mut self.0, number);
    }

    fn key(&mut self, key: Key) {
        let Ok(()): Written<_> = encode::write_bin(&mut self.0, key.as_bytes());
    }

    fn keys(&mut self, keys: impl ExactSizeIterator<Item = Key>) {
        self.array(keys.len());
        keys.for_each(|key| self.key(key));
    }

    fn nothing(&mut self) {
        let Ok(()): Result<(), Infallible> = encode::write_nil(&mut self.0);
    }

    fn text_or_nothing(&mut self, text: &str) {
        if text.is_empty() {
            self.nothing();
        } else {
            self.text(text);
        }
    }
}

/// The fields of one event, named if it is a map.
struct Fields<'a> {
    message: &'a mut Message,
    named: bool,
}

impl<'a> Fields<'a> {
    fn new(message: &'a mut Message, form: &Form, kind: &str, len: usize) -> Self {
        let named = !form.array_events;
        if named {
            message.map(1 + len);
        } else {
            message.array(1 + len);
        }
        let mut fields = Self { message, named };
        fields.put("type").text(kind);
        fields
    }

    fn put(&mut self, name: &str) -> &mut Message {
        if self.named {
            self.message.text(name);
        }
        self.message
    }
}

/// A batch of this moment.
pub(crate) fn encode(events: &[Event], form: &Form, block_size: usize) -> Vec<u8> {
    let mut message = Message(ByteBuf::new());
    message.array(3);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let Ok(()): Written<_> = encode::write_f64(&mut message.0, now.as_secs_f64());
    message.array(events.len());
    for event in events {
        match event {
            Event::Stored(blocks) => stored(&mut message, blocks, form, block_size),
            Event::Removed(keys) => {
                let mut fields = Fields::new(&mut message, form, "BlockRemoved", 2);
                fields.put("block_hashes").keys(keys.iter().copied());
                fields.put("medium").text(&form.medium);
            }
            Event::Cleared => {
                Fields::new(&mut message, form, "AllBlocksCleared", 0);
            }
        }
    }
    message.number(form.rank as i64);
    message.0.into_vec()
}

fn stored(message: &mut Message, blocks: &[Arc<StoredBlock>], form: &Form, block_size: usize) {
    let (Some(first), num_tokens) = (blocks.first(), blocks.len() * block_size) else {
        return;
    };
    let has_extra_keys = blocks.iter().any(|block| num_extra_keys(block) > 0);
    let mut fields = Fields::new(message, form, "BlockStored", 7 + usize::from(has_extra_keys));
    fields.put("block_hashes").keys(blocks.iter().map(|block| block.key()));
    let parent = fields.put("parent_block_hash");
    match first.parent() {
        Some(key) => parent.key(key),
        None => parent.nothing(),
    }
    let tokens = fields.put("token_ids");
    tokens.array(num_tokens);
    blocks.iter().flat_map(|block| block.tokens()).for_each(|token| tokens.number(i64::from(*token)));
    fields.put("block_size").number(block_size as i64);
    fields.put("lora_id").nothing();
    fields.put("medium").text(&form.medium);
    fields.put("lora_name").text_or_nothing(first.adapter());
    if has_extra_keys {
        let message = fields.put("extra_keys");
        message.array(blocks.len());
        for block in blocks {
            extra_keys(message, block);
        }
    }
}

fn num_extra_keys(block: &StoredBlock) -> usize {
    usize::from(!block.adapter().is_empty()) + block.extras().len() + usize::from(block.namespace().is_some())
}

/// In vLLM's order: the adapter, pictures with their offsets, and in place of the salt what stands for all of the
/// context, since the salt is a secret.
fn extra_keys(message: &mut Message, block: &StoredBlock) {
    match num_extra_keys(block) {
        0 => return message.nothing(),
        len => message.array(len),
    }
    if !block.adapter().is_empty() {
        message.text(block.adapter());
    }
    for (digest, offset) in block.extras() {
        message.array(2);
        message.text(&hex(digest));
        message.number(offset);
    }
    if let Some(namespace) = block.namespace() {
        message.text(&hex(namespace.as_bytes()));
    }
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}
