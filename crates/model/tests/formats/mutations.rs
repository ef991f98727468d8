//! Damaged files: whatever the damage, opening and reading end in an answer or an error, never in a panic.

use std::path::Path;

use plimsoll_device::DType;
use plimsoll_model::gguf::GgufFile;
use plimsoll_model::{ModelFiles, SafetensorsFile, SaveWriter};
use proptest::prelude::*;

use crate::support::{Stored, save_tiny, tiny_gguf, tiny_spec, weights, write_file};

/// One way to damage a file.
#[derive(Clone, Debug)]
enum Damage {
    Set(usize, u8),
    SetLong(usize, u64),
    Cut(usize),
    Insert(usize, u8),
    Remove(usize),
    Append(usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    // Mostly in the header, where a byte means something.
    let at = prop_oneof![8 => 0usize..4096, 1 => any::<usize>()];
    let long = prop_oneof![any::<u64>(), Just(u64::MAX), Just(1 << 63), Just(1 << 32), 0u64..100_000];
    prop_oneof![
        (at.clone(), any::<u8>()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        (at.clone(), long).prop_map(|(at, value)| Damage::SetLong(at, value)),
        at.clone().prop_map(Damage::Cut),
        (at.clone(), any::<u8>()).prop_map(|(at, byte)| Damage::Insert(at, byte)),
        at.prop_map(Damage::Remove),
        (0usize..100).prop_map(Damage::Append),
    ]
}

fn apply(mut bytes: Vec<u8>, damages: &[Damage]) -> Vec<u8> {
    for damage in damages {
        let inside = |at: usize, bytes: &[u8]| at % bytes.len().max(1);
        match *damage {
            Damage::Set(at, byte) => {
                let at = inside(at, &bytes);
                bytes.get_mut(at).into_iter().for_each(|b| *b = byte);
            }
            Damage::SetLong(at, value) => {
                let at = inside(at, &bytes);
                bytes[at..].iter_mut().zip(value.to_le_bytes()).for_each(|(b, byte)| *b = byte);
            }
            Damage::Cut(at) => bytes.truncate(inside(at, &bytes)),
            Damage::Insert(at, byte) => bytes.insert(inside(at, &bytes), byte),
            Damage::Remove(at) if !bytes.is_empty() => drop(bytes.remove(inside(at, &bytes))),
            Damage::Remove(_) => {}
            Damage::Append(count) => bytes.extend(std::iter::repeat_n(7, count)),
        }
    }
    bytes
}

/// Opens and, if that goes well, reads everything.
fn exercise(path: &Path, model: &Path) {
    if let Ok(file) = SafetensorsFile::open(path) {
        for tensor in file.tensors() {
            assert_eq!(file.bytes(&tensor.name).unwrap().len(), tensor.bytes.len());
        }
    }
    if let Ok(file) = GgufFile::open(path) {
        for tensor in file.tensors() {
            assert_eq!(file.bytes(tensor).len(), tensor.bytes.len());
        }
        let metadata = file.metadata();
        for entry in metadata.entries() {
            let key = &entry.key;
            let _ = (metadata.u64(key), metadata.f64(key), metadata.bool(key), metadata.str(key));
            let _ = (metadata.strings(key), metadata.integers(key), metadata.f32s(key));
        }
    }
    let opened = ModelFiles::open(model).map_err(|error| error.to_string());
    if let Err(error) = &opened {
        assert!(error.contains(model.file_name().unwrap().to_str().unwrap()), "no file in {error:?}");
    }
    if let Ok(files) = opened {
        for parameter in files.spec().parameters() {
            // A size that lies must be refused before anybody allocates for it.
            assert!(parameter.elements() < 1 << 20, "{}", parameter.name);
            let mut out = vec![0; 4 * parameter.elements() as usize];
            files.weights().read_into(&parameter, DType::F32, &mut out).unwrap();
        }
        let _ = files.tokenizer();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn damaged_gguf(damages in proptest::collection::vec(damage(), 1..4), quantised in any::<bool>()) {
        let stored = if quantised { Stored::Q8_0 } else { Stored::F32 };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        write_file(&path, &apply(gguf(stored), &damages));
        exercise(&path, &path);
    }

    #[test]
    fn damaged_safetensors(damages in proptest::collection::vec(damage(), 1..4)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let (weights, config) = folder_files();
        write_file(&folder.path().join("config.json"), config);
        write_file(&path, &apply(weights.clone(), &damages));
        exercise(&path, folder.path());
    }

    #[test]
    fn damaged_shards(
        damages in proptest::collection::vec(damage(), 1..4), which in any::<prop::sample::Index>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let files = shard_files();
        for (name, bytes) in files {
            write_file(&folder.path().join(name), bytes);
        }
        let (name, bytes) = &files[which.index(files.len())];
        let path = folder.path().join(name);
        write_file(&path, &apply(bytes.clone(), &damages));
        exercise(&path, folder.path());
    }

    #[test]
    fn damaged_config(damages in proptest::collection::vec(damage(), 1..4)) {
        let folder = tempfile::tempdir().unwrap();
        let (weights, config) = folder_files();
        write_file(&folder.path().join("model.safetensors"), weights);
        write_file(&folder.path().join("config.json"), &apply(config.clone(), &damages));
        exercise(&folder.path().join("model.safetensors"), folder.path());
    }

    #[test]
    fn noise(bytes in proptest::collection::vec(any::<u8>(), 0..300), magic in any::<bool>()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("noise.gguf");
        let start: &[u8] = if magic { b"GGUF\x03\0\0\0" } else { b"" };
        write_file(&path, &[start, &bytes].concat());
        exercise(&path, &path);
    }
}

/// All files of a model in several shards, the index among them.
fn shard_files() -> &'static [(String, Vec<u8>)] {
    use std::sync::OnceLock;
    static FILES: OnceLock<Vec<(String, Vec<u8>)>> = OnceLock::new();
    FILES.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let spec = tiny_spec();
        let writer = SaveWriter::new(&spec, DType::Bf16).shard_bytes(60_000);
        writer.write(folder.path(), |p, out| out.write_all(&weights(&spec, p, DType::Bf16))).unwrap();
        let entries = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = entries
            .map(|path| {
                (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read(&path).unwrap())
            })
            .collect();
        files.sort();
        files
    })
}

fn gguf(stored: Stored) -> Vec<u8> {
    use std::sync::OnceLock;
    static FILES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    let [plain, quantised] = FILES
        .get_or_init(|| [Stored::F32, Stored::Q8_0].map(|stored| tiny_gguf(&tiny_spec(), stored).bytes()));
    if stored == Stored::F32 { plain.clone() } else { quantised.clone() }
}

/// The weights and the configuration of a small folder.
fn folder_files() -> &'static (Vec<u8>, Vec<u8>) {
    use std::sync::OnceLock;
    static FILES: OnceLock<(Vec<u8>, Vec<u8>)> = OnceLock::new();
    FILES.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        save_tiny(folder.path(), &tiny_spec(), DType::F32);
        let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
        (read("model.safetensors"), read("config.json"))
    })
}
