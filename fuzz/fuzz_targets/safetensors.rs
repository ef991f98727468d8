//! The header of a safetensors file. Input that begins with `{` is a header, to which the length before it and some
//! data behind it are added; anything else is a whole file.

#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_fuzz::{file, names_file};
use plimsoll_model::SafetensorsFile;

/// Data behind a bare header.
const DATA: [u8; 64] = [7; 64];

fuzz_target!(|input: &[u8]| {
    let bytes = match input.first() {
        Some(b'{') => [&(input.len() as u64).to_le_bytes(), input, &DATA].concat(),
        _ => input.to_vec(),
    };
    let file = file(".safetensors", &bytes);
    match SafetensorsFile::open(file.path()) {
        Ok(opened) => {
            for tensor in opened.tensors() {
                let size = tensor.dtype.bytes_for(&tensor.shape).expect("a checked size");
                let bytes = opened.bytes(&tensor.name).expect("a listed tensor");
                assert_eq!(bytes.len() as u64, size, "{}", tensor.name);
            }
        }
        Err(error) => names_file(&error, &file),
    }
});
