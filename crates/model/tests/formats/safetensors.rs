//! The safetensors reader and writer, against the format's own implementation and against lying headers.

use std::io::Write;

use plimsoll_model::{NewTensor, SafetensorsFile, StoredDType, write_tensors};

use crate::support::{safetensors_bytes, write_file};

fn data(tensor: &NewTensor) -> Vec<u8> {
    let size = tensor.dtype.bytes_for(&tensor.shape).unwrap();
    let first = tensor.name.len() as u64;
    (0..size).map(|i| (i * 7 + first) as u8).collect()
}

fn tensors() -> Vec<NewTensor> {
    [
        ("codes", StoredDType::U8, vec![5]),
        ("scale", StoredDType::F32, vec![3, 4]),
        ("empty", StoredDType::F32, vec![0, 4]),
        ("number", StoredDType::I64, vec![]),
        ("half", StoredDType::BF16, vec![7]),
    ]
    .map(|(name, dtype, shape)| NewTensor { name: name.to_owned(), dtype, shape })
    .to_vec()
}

#[test]
fn what_is_written_is_read_by_us_and_by_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.safetensors");
    let written =
        write_tensors(&path, &[("format", "pt")], &tensors(), |tensor, out| out.write_all(&data(tensor)))
            .unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(written, bytes.len() as u64);

    let ours = SafetensorsFile::open(&path).unwrap();
    let reference = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(ours.metadata(), [("format".to_owned(), "pt".to_owned())]);
    assert_eq!(ours.tensors().len(), tensors().len());
    for tensor in tensors() {
        let expected = data(&tensor);
        assert_eq!(ours.bytes(&tensor.name).unwrap(), expected, "{}", tensor.name);
        let view = reference.tensor(&tensor.name).unwrap();
        assert_eq!(view.data(), expected, "{}", tensor.name);
        assert_eq!(view.shape().iter().map(|n| *n as u64).collect::<Vec<_>>(), tensor.shape);
        ours.release(ours.tensor(&tensor.name).unwrap());
        assert_eq!(ours.bytes(&tensor.name).unwrap(), expected, "{} after release", tensor.name);
        let address = ours.tensor(&tensor.name).unwrap().bytes.start as u64;
        assert!(address.is_multiple_of(tensor.dtype.bits() / 8), "{} is aligned", tensor.name);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
}

#[test]
fn what_cannot_be_written_leaves_nothing() {
    let check = |tensors: &[NewTensor], give: &[u8], expected: &str| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.safetensors");
        let error = write_tensors(&path, &[], tensors, |_, out| out.write_all(give)).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("state.safetensors"), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "{expected}");
    };
    let tensor = |name: &str, shape: &[u64]| NewTensor {
        name: name.to_owned(),
        dtype: StoredDType::F32,
        shape: shape.to_vec(),
    };
    check(&[tensor("a", &[2])], &[0; 7], "1 fewer");
    check(&[tensor("a", &[2])], &[0; 9], "more were given");
    check(&[tensor("a", &[1]), tensor("a", &[1])], &[0; 4], "its name is taken");
    check(&[tensor("__metadata__", &[1])], &[0; 4], "its name is taken");
    check(&[tensor("a", &[1 << 40, 1 << 40])], &[], "its size overflows");
    check(&[tensor("a", &[1 << 61]), tensor("b", &[1 << 61])], &[], "size overflows");
}

#[test]
fn an_error_of_the_source_or_the_system_is_passed_on() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = NewTensor { name: "a".to_owned(), dtype: StoredDType::F32, shape: vec![2] };
    let path = folder.path().join("x");
    let full = |_: &NewTensor, _: &mut dyn Write| Err(std::io::ErrorKind::StorageFull.into());
    let error = write_tensors(&path, &[], std::slice::from_ref(&tensor), full).unwrap_err().to_string();
    assert!(error.contains("free some space"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);

    let nowhere = folder.path().join("missing").join("x");
    let error =
        write_tensors(&nowhere, &[], &[tensor], |_, out| out.write_all(&[0; 8])).unwrap_err().to_string();
    assert!(error.contains("missing"), "{error}");
}

#[test]
fn lying_headers_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.safetensors");
    let check = |bytes: &[u8], expected: &str| {
        write_file(&path, bytes);
        let error = SafetensorsFile::open(&path).unwrap_err().to_string();
        assert!(error.contains(expected), "expected {expected:?} in {error:?}");
        assert!(error.contains("bad.safetensors"), "{error}");
    };
    let header = |text: &str, data| safetensors_bytes(text, data);
    let one = |dtype: &str, shape: &str, offsets: &str| {
        safetensors_bytes(
            &format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#),
            8,
        )
    };

    check(b"", "has 0 bytes");
    check(b"\x01\0\0", "has 3 bytes");
    check(&u64::MAX.to_le_bytes(), "cut short");
    check(&[&100u64.to_le_bytes()[..], b"{}"].concat(), "cut short");
    check(&header("{", 0), "header, line 1");
    check(&header("[]", 0), "header, line 1");
    check(&header("{} x", 0), "header, line 1");
    check(&header("{\"\u{ff}\": ", 0), r#"tensor "ÿ": its entry is malformed: EOF"#);
    check(&safetensors_bytes("{}", 3), "3 bytes after the last tensor");
    check(&header(r#"{"__metadata__":{"a":1}}"#, 0), "invalid type");
    check(&header(r#"{"__metadata__":{},"__metadata__":{}}"#, 0), "twice");
    check(&header(&format!(r#"{{"w":{}"#, "[".repeat(100_000)), 0), "malformed");
    check(&header(&format!(r#"{{"w":{{"x":{}"#, "[".repeat(100_000)), 0), "malformed");
    check(&header(r#"{"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 8), "duplicate");
    check(&header(r#"{"w":3}"#, 0), r#"tensor "w": its entry is malformed"#);
    check(&header(r#"{"w":{"dtype":"F32","shape":[2]}}"#, 8), "data_offsets");
    check(&one("Q9", "[2]", "[0,8]"), "unknown element type \"Q9\"");
    check(&one("F32", "[3]", "[0,8]"), "takes 12 bytes");
    check(&one("F32", "[-2]", "[0,8]"), "malformed");
    check(&one("F32", "[2.5]", "[0,8]"), "malformed");
    check(&one("F32", "[2]", "[8,0]"), "run backwards");
    check(&one("F32", "[2]", "[4,12]"), "the file is cut short");
    check(&one("F32", "[1]", "[4,8]"), "4 bytes before it belong to no tensor");
    check(&one("F32", "[4294967296,4294967296,4]", "[0,8]"), "overflows");
    check(&one("F32", "[18446744073709551616]", "[0,8]"), "malformed");
    check(&one("F32", "[4611686018427387904]", "[0,8]"), "overflows");
    check(&one("U8", "[18446744073709551615]", "[0,18446744073709551615]"), "overflows");
    check(&one("U8", "[1152921504606846976]", "[0,1152921504606846976]"), "the file is cut short");
    check(&one("F4", "[15]", "[0,8]"), "no whole number of bytes");
    check(&one("F32", &format!("[{}1]", "1,".repeat(40)), "[0,8]"), "more than 16 sizes");
    let entry = |name: &str, begin, end| {
        format!(r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{end}]}}"#, end - begin)
    };
    let two = |a: String, b: String| safetensors_bytes(&format!("{{{a},{b}}}"), 8);
    check(&two(entry("a", 0, 5), entry("b", 4, 8)), r#"overlap those of "a""#);
    check(&two(entry("a", 0, 8), entry("b", 2, 4)), r#"overlap those of "a""#);
    check(&two(entry("a", 0, 4), entry("a", 4, 8)), "twice");
    check(&two(entry("a", 0, 3), entry("b", 4, 8)), "1 bytes before it");
    let spoilt = [&one("F32", "[2]", "[0,8]")[..10], &[0xff], &one("F32", "[2]", "[0,8]")[11..]].concat();
    check(&spoilt, "invalid");
}

/// The header may take 100 MB and no more, even where the file has them.
#[test]
fn an_oversized_header_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.safetensors");
    let file = std::fs::File::create(&path).unwrap();
    (&file).write_all(&100_000_001u64.to_le_bytes()).unwrap();
    // A hole: no disk is taken.
    file.set_len(200_000_000).unwrap();
    let error = SafetensorsFile::open(&path).unwrap_err().to_string();
    assert!(error.contains("more than the 100000000 that the format allows"), "{error}");
}

#[test]
fn errors_stay_short_whatever_the_names() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long.safetensors");
    let name = "n".repeat(1 << 20);
    for header in [
        format!(r#"{{"{name}":{{"dtype":"Q9","shape":[2],"data_offsets":[0,8]}}}}"#),
        format!(r#"{{"w":{{"dtype":"{name}","shape":[2],"data_offsets":[0,8]}}}}"#),
        format!(r#"{{"w":"{name}"}}"#),
        format!(r#"{{"__metadata__":"{name}"}}"#),
    ] {
        write_file(&path, &safetensors_bytes(&header, 8));
        let error = SafetensorsFile::open(&path).unwrap_err().to_string();
        assert!(error.contains("nnn") && error.len() < 1000, "{} bytes: {:.2000}", error.len(), error);
    }
}
