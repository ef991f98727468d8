//! What a rank holds by stage of ZeRO and number of data parallel ranks, beside what the paper's formula says. What else ranks
//! share is as in the plan.

use plimsoll_memory::Tag;
use plimsoll_parallel::Mesh;
use plimsoll_step::{Ranks, Sharding, StepError, StepSettings, ZeroStage};
use serde::Serialize;

use crate::dry_run::DryRun;
use crate::training_plan::TrainingPlan;

/// Numbers of data parallel ranks that people ask for first.
const RANKS: [u32; 5] = [1, 2, 4, 8, 64];

const STAGES: [ZeroStage; 4] =
    [ZeroStage::Nothing, ZeroStage::States, ZeroStage::Gradients, ZeroStage::Weights];

/// What the first rank of so many holds, in bytes: the most of each kind, and the peak.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ZeroRow {
    /// The stage.
    pub zero_stage: u32,
    /// All ranks.
    pub ranks: u32,
    /// Those that take other micro-batches than each other.
    pub data_parallel: u32,
    /// Weights, with adapters.
    pub weights: u64,
    /// Gradients.
    pub gradients: u64,
    /// Optimizer states and master weights.
    pub states: u64,
    /// What ranks send and receive through.
    pub communication: u64,
    /// Peak of the device's arena, with activations and everything else.
    pub device_peak_bytes: u64,
    /// Weights, gradients and states by the formula of the ZeRO paper, which knows nothing else.
    pub paper_bytes: u64,
}

impl TrainingPlan {
    /// The step of the plan with several numbers of data parallel ranks, in each stage. Each rank takes the micro-batches of the plan.
    pub fn zero_table(&self) -> Result<Vec<ZeroRow>, StepError> {
        let Mesh { data: own, expert, .. } = self.choice.settings.ranks.mesh;
        let groups = |count: &u32| count.is_multiple_of(expert.max(1));
        let mut counts: Vec<u32> = RANKS.into_iter().chain([own]).filter(groups).collect();
        counts.sort_unstable();
        counts.dedup();
        let mut rows = Vec::new();
        for (number, stage) in (0..).zip(STAGES) {
            for count in counts.iter().copied() {
                rows.push(self.zero_row(number, stage, count)?);
            }
        }
        Ok(rows)
    }

    fn zero_row(&self, zero_stage: u32, stage: ZeroStage, count: u32) -> Result<ZeroRow, StepError> {
        let mesh = Mesh { data: count, ..self.choice.settings.ranks.mesh };
        let settings = StepSettings {
            ranks: Ranks { rank: 0, mesh },
            sharding: Sharding { stage, ..Sharding::default() },
            ..self.choice.settings.clone()
        };
        let run = DryRun::training_for(
            self.machine.rates.wiring.device,
            &self.spec,
            &settings,
            self.choice.accumulation,
        )?;
        let ledgers = [&run.ledger, &run.host, &run.disk];
        let most = |tags: &[Tag]| -> u64 {
            let of = |tag: &Tag| ledgers.iter().map(|ledger| ledger.most(*tag)).sum::<u64>();
            tags.iter().map(of).sum()
        };
        Ok(ZeroRow {
            zero_stage,
            ranks: mesh.size(),
            data_parallel: count,
            weights: most(&[Tag::Weights, Tag::Adapters]),
            gradients: most(&[Tag::Gradients]),
            states: most(&[Tag::Optimizer, Tag::MasterWeights]),
            communication: most(&[Tag::Communication]),
            device_peak_bytes: run.peak_bytes(),
            paper_bytes: self.by_the_paper(stage, mesh),
        })
    }

    /// Rajbhandari et al. 2020, section 3: weights and gradients of their types and K bytes of states a parameter, the shares of
    /// which are so many of the ranks that hold the same. Stages of a pipeline and ranks that share products have as many parameters
    /// each, and ranks with different experts as many of these.
    fn by_the_paper(&self, stage: ZeroStage, mesh: Mesh) -> u64 {
        let StepSettings { precision, method, .. } = &self.choice.settings;
        let (parameters, ranks) = (self.trainable_parameters() as f64, mesh.replicas());
        let bytes = |dtype: plimsoll_device::DType| dtype.bytes_for(1).unwrap_or(0) as f64;
        let master = if precision.master_weights { 4.0 } else { 0.0 };
        let [weights, gradients] = [precision.weights, precision.gradients].map(bytes);
        let states = self.state_bytes_whole() as f64 / parameters.max(1.0) + master;
        let shared = |from: ZeroStage| if stage >= from { f64::from(ranks) } else { 1.0 };
        let each = [
            weights / shared(ZeroStage::Weights),
            gradients / shared(ZeroStage::Gradients),
            states / shared(ZeroStage::States),
        ];
        let trained = method.trained(&self.spec);
        let of_experts =
            trained.iter().filter(|p| p.is_of_experts()).map(|p| p.elements()).sum::<u64>() as f64;
        let own =
            (parameters - of_experts) / f64::from(mesh.tensor.max(1)) + of_experts / f64::from(mesh.parts());
        (own / f64::from(mesh.pipeline.max(1)) * each.iter().sum::<f64>()) as u64
    }
}
