//! What files hold as it is computed with can be read from there: the bytes are those that reading would give.

use std::io::{Read, Seek, SeekFrom};

use plimsoll_device::DType;
use plimsoll_model::{ModelFiles, ModelSpec, Parameter, Role};

use crate::support::{Stored, save_tiny, tiny_gguf, tiny_spec, write_file};

/// Every matrix that the files are said to hold, against what is read; the names of those that they do not, in order.
fn check(files: &ModelFiles, types: &dyn Fn(&Parameter) -> DType) -> Vec<String> {
    let matrix = |p: &Parameter| p.shape.len() == 2 && p.role != Role::PositionEmbedding;
    let mut others = Vec::new();
    for p in files.spec().parameters().into_iter().filter(matrix) {
        let dtype = types(&p);
        let Some(stored) = files.weights().stored_as(&p, dtype) else {
            others.push(p.name);
            continue;
        };
        assert_eq!(stored.dtype, dtype);
        assert!(stored.bytes.start.is_multiple_of(dtype.alignment()), "{}", p.name);
        let mut expected = vec![0; dtype.bytes_for(p.elements()).unwrap() as usize];
        files.weights().read_into(&p, dtype, &mut expected).unwrap();
        let mut file = std::fs::File::open(&stored.path).unwrap();
        file.seek(SeekFrom::Start(stored.bytes.start)).unwrap();
        let mut found = vec![0; (stored.bytes.end - stored.bytes.start) as usize];
        file.read_exact(&mut found).unwrap();
        assert!(found == expected, "{}", p.name);
    }
    others.sort_unstable();
    others
}

fn untied() -> ModelSpec {
    ModelSpec { tie_word_embeddings: false, ..tiny_spec() }
}

#[test]
fn what_is_stored_as_it_is_needed_is_where_it_is_said_to_be() {
    let folder = tempfile::tempdir().unwrap();
    for spec in [tiny_spec(), untied()] {
        save_tiny(folder.path(), &spec, DType::Bf16);
        let files = ModelFiles::open(folder.path()).unwrap();
        assert!(check(&files, &|_| DType::Bf16).is_empty());
        let all = check(&files, &|_| DType::F32);
        assert_eq!(all.len(), spec.parameters().iter().filter(|p| p.shape.len() == 2).count());
        let quantized = check(&files, &|p| if p.role.is_block_matrix() { DType::Nf4 } else { DType::Bf16 });
        assert_eq!(quantized.len(), 7 * 2);
    }
}

#[test]
fn rows_in_another_order_have_to_be_read_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    for spec in [tiny_spec(), untied()] {
        write_file(&path, &tiny_gguf(&spec, Stored::Q8_0).bytes());
        let files = ModelFiles::open(&path).unwrap();
        let others = check(&files, &|p| files.weights().inference_dtype(p, DType::F32));
        assert_eq!(others.len(), 2 * 2);
        assert!(others.iter().all(|name| name.contains("q_proj") || name.contains("k_proj")), "{others:?}");
    }
}
