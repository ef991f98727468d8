//! Models that other programs make by name, found by their sizes.

use plimsoll_model::{ModelSpec, catalogue};

/// The entry whose model, named as in the catalogue, has the sizes of `spec`; of several the one with its name, or with its positions.
pub(super) fn entry<'t, T>(
    spec: &ModelSpec,
    table: &'t [T],
    name: impl Fn(&T) -> &'static str,
) -> Option<&'t T> {
    let found = table.iter().filter_map(|entry| Some((entry, catalogue::find(name(entry)).ok()?)));
    let alike: Vec<(&T, ModelSpec)> = found.filter(|(_, other)| sizes(other) == sizes(spec)).collect();
    let same_name = alike.iter().find(|(_, other)| other.name == spec.name);
    let same_rope = || alike.iter().find(|(_, other)| other.attention.rope == spec.attention.rope);
    same_name.or_else(same_rope).or(alike.first()).map(|(entry, _)| *entry)
}

/// What tells models apart that programs build by name.
fn sizes(spec: &ModelSpec) -> (&str, [u64; 6]) {
    let attention = &spec.attention;
    let numbers = [
        spec.hidden_size,
        u64::from(spec.num_layers),
        spec.vocab_size,
        attention.heads,
        attention.kv_heads,
        attention.head_dim,
    ];
    (&spec.architecture, numbers)
}
