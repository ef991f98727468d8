//! Names and shapes of a layer with experts in Hugging Face's checkpoints: a tensor for each matrix of each expert, or one for all
//! gates and ups of a layer and one for all downs, as transformers has them in memory since its version 5.

use super::{StoredPart, StoredTensor};
use crate::parameters::{Parameter, Role};
use crate::source::RowOrder;
use crate::spec::{ExpertsSpec, ModelSpec};

/// What a checkpoint stores of a layer with experts.
pub(super) fn hf_layer(
    spec: &ModelSpec,
    experts: &ExpertsSpec,
    parameters: Vec<Parameter>,
) -> Vec<StoredTensor> {
    let family = spec.architecture.as_str();
    let (mut of_experts, mut tensors) = (Vec::new(), Vec::new());
    for parameter in parameters {
        if parameter.is_of_experts() {
            of_experts.push(parameter);
        } else {
            tensors.push(StoredTensor::plain(name(family, experts.stacked_files, &parameter), parameter));
        }
    }
    if experts.stacked_files && family == "gpt_oss" {
        tensors.extend(alternating_stacks(experts, &of_experts));
    } else if experts.stacked_files {
        tensors.extend(stacks(experts, of_experts));
    } else {
        // Matrix by matrix, so that a stack is written in order.
        for parameter in &of_experts {
            tensors.extend((0..experts.count).map(|expert| {
                let rows = parameter.rows_of_expert(expert);
                let part = StoredPart { parameter: parameter.clone(), rows };
                StoredTensor::of_rows(single_name(family, parameter, expert), vec![part])
            }));
        }
    }
    tensors
}

/// `gate_up_proj [E, 2 I, H]`, each expert's gate before its up, and `down_proj [E, H, I]`; both without `.weight`.
fn stacks(experts: &ExpertsSpec, parameters: Vec<Parameter>) -> Vec<StoredTensor> {
    let (down, mut inner): (Vec<_>, Vec<_>) =
        parameters.into_iter().partition(|parameter| parameter.role == Role::DownProj);
    inner.sort_by_key(|parameter| parameter.role != Role::GateProj);
    let stack = |part: &str, of: &[Parameter]| {
        let at = of.first()?.name.rsplit_once(".experts.")?.0;
        let each = |expert| of.iter().map(move |parameter| (parameter, expert));
        let parts = (0..experts.count).flat_map(each).map(|(parameter, expert)| StoredPart {
            rows: parameter.rows_of_expert(expert),
            parameter: parameter.clone(),
        });
        let tensor = StoredTensor::of_rows(format!("{at}.experts.{part}"), parts.collect());
        Some(StoredTensor { stack: Some(experts.count), ..tensor })
    };
    let down = down.into_iter().map(|parameter| {
        let name = parameter.name.trim_end_matches(".weight").to_owned();
        StoredTensor::plain(name, parameter)
    });
    stack("gate_up_proj", &inner).into_iter().chain(down).collect()
}

/// gpt-oss: `gate_up_proj [E, H, 2 I]`, whose columns are gate and up by turns, `down_proj [E, I, H]`, and their biases `[E, 2 I]` and `[E,
/// H]`.
fn alternating_stacks(experts: &ExpertsSpec, parameters: &[Parameter]) -> Vec<StoredTensor> {
    let stack = |name: &str, roles: &[Role], rows: &dyn Fn(u64) -> RowOrder, of_matrices: bool| {
        let of: Vec<&Parameter> =
            roles.iter().filter_map(|role| parameters.iter().find(|p| p.role == *role)).collect();
        let at = of.first()?.name.rsplit_once(".experts.")?.0;
        let each = |expert| of.iter().map(move |parameter| (*parameter, expert));
        let parts: Vec<StoredPart> = (0..experts.count)
            .flat_map(each)
            .map(|(parameter, expert)| StoredPart {
                rows: parameter.rows_of_expert(expert),
                parameter: parameter.clone(),
            })
            .collect();
        let total = parts.iter().take(of.len()).map(StoredPart::count).sum();
        let tensor = StoredTensor::of_rows(format!("{at}.experts.{name}"), parts);
        let stack = of_matrices.then_some(experts.count);
        Some(StoredTensor { rows: rows(total), stack, ..tensor })
    };
    let transposed = |step| move |total| RowOrder::Transposed { total, first: 0, step };
    [
        stack("gate_up_proj", &[Role::GateProj, Role::UpProj], &transposed(2), true),
        stack(
            "gate_up_proj_bias",
            &[Role::GateBias, Role::UpBias],
            &|_| RowOrder::Alternating { of: 2, first: 0 },
            false,
        ),
        stack("down_proj", &[Role::DownProj], &transposed(1), true),
        stack("down_proj_bias", &[Role::DownBias], &|_| RowOrder::Natural, false),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The name of a matrix of one expert.
fn single_name(family: &str, parameter: &Parameter, expert: u64) -> String {
    let numbered = parameter.name.replace(".experts.", &format!(".experts.{expert}."));
    if family != "mixtral" {
        return numbered;
    }
    let part = match parameter.role {
        Role::GateProj => ".w1.",
        Role::UpProj => ".w3.",
        _ => ".w2.",
    };
    let own = [".gate_proj.", ".up_proj.", ".down_proj."];
    let renamed = own.into_iter().fold(numbered, |name, from| name.replace(from, part));
    renamed.replace(".mlp.", ".block_sparse_moe.")
}

/// Whether a family's files call what every token goes through `shared_experts`.
fn has_shared_experts(family: &str) -> bool {
    matches!(family, "glm4_moe" | "glm4_moe_lite" | "deepseek" | "deepseek_v2" | "deepseek_v3")
}

/// The name of what is no expert's.
fn name(family: &str, stacked: bool, parameter: &Parameter) -> String {
    let name = &parameter.name;
    match (family, parameter.role) {
        ("gpt_oss", Role::Router | Role::RouterBias) => name.replace(".mlp.gate.", ".mlp.router."),
        ("mixtral", Role::Router) if !stacked => name.replace(".mlp.", ".block_sparse_moe."),
        (family, Role::SharedGateProj | Role::SharedUpProj | Role::SharedDownProj)
            if has_shared_experts(family) =>
        {
            name.replace(".shared_expert.", ".shared_experts.")
        }
        _ => name.clone(),
    }
}
