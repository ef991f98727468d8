//! Adapters of singular values (PiSSA): written for the base as it is, and told apart again. `crates/train/tests/pissa.rs`
//! compares their values and their training with PEFT's.

use std::path::Path;

use plimsoll_device::DType;
use plimsoll_model::adapter::{AdapterSet, AdapterStart, FirstValues};
use plimsoll_model::{Adapter, AdapterConfig, AdapterLayout, ModelFiles, Parameter, SafetensorsFile};

fn data() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/data")
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// |a - b| / |b|
fn difference(got: &[f32], wanted: &[f32]) -> f64 {
    assert_eq!(got.len(), wanted.len());
    let square = |x: f32| f64::from(x).powi(2);
    let sums = got.iter().zip(wanted).map(|(a, b)| (square(a - b), square(*b)));
    let (apart, all) = sums.fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
    (apart / all).sqrt()
}

fn layout(files: &ModelFiles, power_iterations: Option<u32>, dora: bool) -> AdapterLayout {
    let config = AdapterConfig {
        rank: 4,
        alpha: 6.0,
        use_dora: dora,
        start: AdapterStart::Pissa { power_iterations },
        ..AdapterConfig::default()
    };
    AdapterLayout::new(&config, files.spec()).unwrap()
}

fn residual(files: &ModelFiles, layout: &AdapterLayout, first: &FirstValues, p: &Parameter) -> Vec<f32> {
    let mut values = vec![0.0f32; p.elements() as usize];
    let bytes = bytemuck::cast_slice_mut(&mut values);
    first
        .residual_rows_into(layout, files.spec(), files.weights(), p, p.all_rows(), DType::F32, bytes)
        .unwrap();
    values
}

#[test]
fn residuals_are_those_of_peft() {
    let place = tempfile::tempdir().unwrap();
    let files = ModelFiles::open(&data().join("families/llama")).unwrap();
    let expected = SafetensorsFile::open(&data().join("pissa/llama.safetensors")).unwrap();
    let layout = layout(&files, None, false);
    let first = layout.first_folder(place.path(), files.spec(), files.weights(), 0).unwrap();
    let mut compared = 0;
    for p in files.spec().parameters().iter().filter(|p| layout.adapts(p)) {
        let name = p.name.strip_suffix(".weight").unwrap();
        let wanted = floats(expected.bytes(&format!("{name}.residual")).unwrap());
        let apart = difference(&residual(&files, &layout, &first, p), &wanted);
        assert!(apart < 1e-4, "{name}: {apart}");
        compared += 1;
    }
    assert_eq!(2 * compared, expected.tensors().len());
}

#[test]
fn what_was_trained_is_written_for_the_base_as_it_is_and_told_apart_again() {
    let place = tempfile::tempdir().unwrap();
    for (family, iterations, dora) in
        [("llama", None, false), ("llama", Some(3), true), ("gpt2", None, false), ("phi3", Some(1), false)]
    {
        let files = ModelFiles::open(&data().join("families").join(family)).unwrap();
        let spec = files.spec();
        let layout = layout(&files, iterations, dora);
        let folder = place.path().join(format!("{family}{iterations:?}"));
        let first = layout.first_folder(&folder.join("first"), spec, files.weights(), 5).unwrap();
        let trained = |p: &Parameter| -> Vec<f32> {
            let begun = first.values(&layout, spec, p).unwrap();
            begun.iter().enumerate().map(|(i, x)| x + (i % 7) as f32 / 64.0).collect()
        };
        let written = folder.join("written");
        layout.write_converted(&written, spec, &first, |p| Ok(trained(p))).unwrap();
        let adapter = Adapter::open(&written, spec).unwrap();
        assert_eq!((adapter.config().rank, adapter.config().alpha), (8, 12.0));

        let (own, begun) = adapter.clone().split(&layout).unwrap();
        let set = AdapterSet::of(own, &written, &layout).unwrap();
        for p in layout.parameters() {
            let mut read = vec![0.0f32; p.elements() as usize];
            let bytes = bytemuck::cast_slice_mut(&mut read);
            set.read_rows_into(spec, files.weights(), p, p.all_rows(), DType::F32, bytes).unwrap();
            assert!(read == trained(p), "{family} {}", p.name);
        }
        let again = Adapter::open(&folder.join("first"), spec).unwrap();
        assert_eq!(begun.low_rank(), again.low_rank(), "{family}");

        // Base and converted adapter are residual and trained adapter: W + s (B A - B0 A0).
        for module in layout.modules().iter().filter(|_| !dora) {
            let weight = format!("{}.weight", module.name);
            let (converted, own) = (&adapter.low_rank()[&weight], &set.adapters()[0].0.low_rank()[&weight]);
            let mut row = 0;
            for part in &module.parts {
                let p =
                    spec.block_parameters(module.block).into_iter().find(|p| p.role == part.role()).unwrap();
                let columns = p.shape[1] as usize;
                let mut base = vec![0.0f32; p.elements() as usize];
                let bytes = bytemuck::cast_slice_mut(&mut base);
                files.weights().read_into(&p, DType::F32, bytes).unwrap();
                let mut left = residual(&files, &layout, &first, &p);
                for (base, left) in base.chunks_exact_mut(columns).zip(left.chunks_exact_mut(columns)) {
                    converted.add_to_row(row, 1.0, base);
                    own.add_to_row(row, 1.0, left);
                    row += 1;
                }
                let apart = difference(&base, &left);
                assert!(apart < 1e-5, "{family} {}: {apart}", p.name);
            }
        }
    }
}
