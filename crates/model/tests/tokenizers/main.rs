//! Tokenizers of every kind, with vocabularies small enough to follow by hand.

mod files;
mod hostile;
mod kinds;
mod special_tokens;
mod streams;
mod vocabularies;
