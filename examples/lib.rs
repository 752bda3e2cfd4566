//! What the worked examples share: a small seeded language ([`valley`]) and its tokenizer ([`words`]).

pub mod valley;
pub mod words;
