//! Adapters on experts in PEFT's newer form, where the matrices of all experts of a layer are one parameter: `experts.lora_A.weight
//! [E r, in]` and `experts.lora_B.weight [out, r E]` for one of the layer's two parameters, and `experts.base_layer.lora_A.weight` and so
//! on for the other. They are taken apart into what each matrix of each expert has.

use std::collections::BTreeMap;

use super::{AdapterConfig, LowRank, Matrix, linears};
use crate::parameters::{BlockId, Role};
use crate::spec::ModelSpec;

/// A module's name in a model of that shape, which transformers calls otherwise in memory than in Mixtral's files.
pub(super) fn renamed(spec: &ModelSpec, name: &str) -> String {
    match spec.architecture.as_str() {
        "mixtral" => name.replace(".mlp.", ".block_sparse_moe."),
        _ => name.to_owned(),
    }
}

/// A and B of one parameter.
#[derive(Default)]
struct Pair {
    a: Option<Matrix>,
    b: Option<Matrix>,
}

/// The adapters of a file that are of whole stacks.
pub(super) struct Stacks<'a> {
    spec: &'a ModelSpec,
    /// By the module's name, `base_layer` included.
    pairs: BTreeMap<String, Pair>,
}

impl<'a> Stacks<'a> {
    pub(super) fn of(spec: &'a ModelSpec) -> Stacks<'a> {
        Stacks { spec, pairs: BTreeMap::new() }
    }

    /// Takes a tensor if it is of a stack, and gives it back if it is not.
    pub(super) fn take(&mut self, name: &str, matrix: Matrix) -> Option<Matrix> {
        for suffix in [".lora_A.weight", ".lora_B.weight"] {
            let module = name.strip_suffix(suffix);
            let of_stack = module.filter(|module| {
                module.ends_with(".mlp.experts") || module.ends_with(".mlp.experts.base_layer")
            });
            if let Some(module) = of_stack {
                let pair = self.pairs.entry(module.to_owned()).or_default();
                let place = if suffix.contains("_A") { &mut pair.a } else { &mut pair.b };
                *place = Some(matrix);
                return None;
            }
        }
        Some(matrix)
    }

    /// What each matrix of each expert has, by its tensor's name; or the module that is wrong, and why.
    pub(super) fn split(self, config: &AdapterConfig) -> Result<BTreeMap<String, LowRank>, (String, String)> {
        let mut all = BTreeMap::new();
        for (module, pair) in self.pairs {
            let split = split(self.spec, config, &module, pair).map_err(|reason| (module, reason))?;
            all.extend(split);
        }
        Ok(all)
    }
}

fn split(
    spec: &ModelSpec,
    config: &AdapterConfig,
    module: &str,
    pair: Pair,
) -> Result<Vec<(String, LowRank)>, String> {
    let (Some(a), Some(b)) = (pair.a, pair.b) else {
        return Err("it has one of lora_A and lora_B alone".to_owned());
    };
    if spec.architecture == "gpt_oss" {
        return Err("adapters of whole stacks of gpt-oss, whose gates and ups stand by turns, are not read"
            .to_owned());
    }
    let at = module.trim_end_matches(".base_layer");
    let layer = at.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    let of_layer = layer.filter(|layer| spec.layers().any(|own| own == *layer));
    let Some((layer, experts)) = of_layer.and_then(|layer| Some((layer, spec.experts_of(layer)?))) else {
        return Err("the model has no experts there; the adapter belongs to another one".to_owned());
    };
    let count = experts.count as usize;
    let rank = a.rows / count.max(1);
    if rank == 0 || a.rows != rank * count || b.columns != a.rows {
        return Err(format!(
            "A has {} rows and B {} columns; both are as many as {count} experts times the rank",
            a.rows, b.columns
        ));
    }
    let (hidden, inner) = (spec.hidden_size as usize, experts.intermediate_size as usize);
    let (part, roles): (_, &[Role]) = match (a.columns, b.rows) {
        (columns, rows) if [columns, rows] == [inner, hidden] => ("down_proj", &[Role::DownProj]),
        (columns, rows) if [columns, rows] == [hidden, 2 * inner] => {
            ("gate_up_proj", &[Role::GateProj, Role::UpProj])
        }
        (columns, rows) => {
            return Err(format!(
                "is for matrices [{rows}, {columns}]; the model's experts have [{}, {hidden}] and [{hidden}, {inner}]",
                2 * inner
            ));
        }
    };
    let scale = config.scale(&format!("{at}.{part}"), rank).map_err(|error| error.to_string())?;
    let mut split = Vec::new();
    let singles = linears(spec, BlockId::Layer(layer));
    for (nth, role) in roles.iter().enumerate() {
        let rows = b.rows / roles.len();
        let of_role = singles.iter().filter(|tensor| tensor.is_of(|own| own == *role));
        for (expert, tensor) in of_role.enumerate() {
            let own = expert * rank * a.columns..(expert + 1) * rank * a.columns;
            let a = Matrix {
                rows: rank,
                columns: a.columns,
                values: a.values.get(own).unwrap_or_default().to_vec(),
            };
            let row = |row: usize| (0..rank).map(move |r| (nth * rows + row, r * count + expert));
            let at = |(row, column): (usize, usize)| b.row(row).get(column).copied().unwrap_or(0.0);
            // Patterns are for the stack; saved again, the matrix has the factor that its own name gives.
            let name = tensor.name.trim_end_matches(".weight");
            let own = config.scale(name, rank).map_err(|error| error.to_string())?;
            let factor = scale / own;
            let values = (0..rows).flat_map(row).map(|place| factor * at(place)).collect();
            let b = Matrix { rows, columns: rank, values };
            split.push((
                tensor.name.clone(),
                LowRank { a, b, scale: own, magnitudes: None, embedding: false },
            ));
        }
    }
    Ok(split)
}
