//! Types for groups of weights, as a user writes them: `experts=q4_k,attention=q8_0,bf16`.

use plimsoll_device::DType;
use plimsoll_device::cpu::quantize::can_quantize;
use plimsoll_model::{ModelSpec, TypesByGroup, WeightGroup};

use crate::failure::Failure;

/// Reads types for a model's groups; `known` reads the name of a type that the flag takes, or says which there are.
pub fn types_by_group(
    flag: &str,
    text: &str,
    spec: &ModelSpec,
    known: impl Fn(&str) -> Result<DType, String>,
) -> Result<TypesByGroup, Failure> {
    let fail = |reason: String| Failure::usage(format!("{flag} {text}: {reason}"));
    let there = WeightGroup::in_model(spec);
    let mut types = TypesByGroup::default();
    for item in text.split(',').map(str::trim) {
        let Some((name, dtype)) = item.split_once('=') else {
            if types.rest().is_some() {
                return Err(fail(
                    "two types for all other weights; the rest are written as GROUP=TYPE".to_owned(),
                ));
            }
            types = types.with_rest(known(&item.to_lowercase()).map_err(fail)?);
            continue;
        };
        let name = name.trim();
        let group = WeightGroup::named(name).filter(|group| there.contains(group)).ok_or_else(|| {
            let names: Vec<&str> = there.iter().map(|group| group.name()).collect();
            fail(format!("{} has no group '{name}' of its own; it has {}", spec.name, names.join(", ")))
        })?;
        if types.named().any(|(named, _)| named == group) {
            return Err(fail(format!("{name} has two types")));
        }
        types = types.with(group, known(&dtype.trim().to_lowercase()).map_err(fail)?);
    }
    Ok(types)
}

/// The types that `--quantize` says.
pub fn quantized_types(text: Option<&str>, spec: &ModelSpec) -> Result<TypesByGroup, Failure> {
    let Some(text) = text else { return Ok(TypesByGroup::default()) };
    let types = types_by_group("--quantize", text, spec, |name| {
        let all = || DType::ALL.into_iter().filter(|dtype| can_quantize(*dtype));
        all().find(|dtype| dtype.name() == name).ok_or_else(|| {
            let names: Vec<&str> = all().map(DType::name).collect();
            format!("must be one of {}, or some of them as GROUP=TYPE", names.join(", "))
        })
    })?;
    if let Some((group, _)) = types.named().find(|(group, _)| !WeightGroup::LINEARS.contains(group)) {
        let names: Vec<&str> = WeightGroup::LINEARS.iter().map(|group| group.name()).collect();
        let reason = format!("{} is not quantised while loading; {} are", group.name(), names.join(", "));
        return Err(Failure::usage(format!("--quantize {text}: {reason}")));
    }
    Ok(types)
}
