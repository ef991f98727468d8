//! A GGUF file: the container, the model's shape, its weights and its tokenizer.

#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_device::DType;
use plimsoll_fuzz::{file, names_file};
use plimsoll_model::ModelFiles;
use plimsoll_model::gguf::GgufFile;

fuzz_target!(|bytes: &[u8]| {
    let file = file(".gguf", bytes);
    match GgufFile::open(file.path()) {
        Ok(opened) => {
            for tensor in opened.tensors() {
                assert_eq!(opened.bytes(tensor).len(), tensor.bytes.len());
            }
            let metadata = opened.metadata();
            for key in metadata.entries().iter().map(|entry| entry.key.as_str()) {
                let _ = (metadata.u64(key), metadata.f64(key), metadata.bool(key), metadata.str(key));
                let _ = (metadata.strings(key), metadata.integers(key), metadata.f32s(key));
            }
        }
        Err(error) => return names_file(&error, &file),
    }
    let model = match ModelFiles::open(file.path()) {
        Ok(model) => model,
        Err(error) => return names_file(&error, &file),
    };
    for parameter in model.spec().parameters() {
        // The shape has been checked against the file, so that the largest block type bounds it.
        assert!(parameter.elements() <= 2 * bytes.len() as u64, "{}", parameter.name);
        let mut out = vec![0; 4 * parameter.elements() as usize];
        model.weights().read_into(&parameter, DType::F32, &mut out).expect("a checked parameter");
    }
    match model.tokenizer() {
        Ok(tokenizer) => {
            if let Ok(ids) = tokenizer.encode("Hello, wörld 123 <s>") {
                assert!(ids.iter().all(|id| u64::from(*id) < model.spec().vocab_size));
                let _ = tokenizer.decode(&ids);
            }
        }
        Err(error) => names_file(&error, &file),
    }
});
