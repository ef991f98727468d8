//! File formats end to end: what is written is read back, and what is damaged is refused with the file's name and
//! the place in it.

mod bad_input;
mod experts;
mod gguf;
mod hf_config;
mod mutations;
mod open;
mod round_trip;
mod safetensors;
mod save;
mod stored_as;
mod support;
mod tokenizer_gguf;
mod tokenizer_json;
