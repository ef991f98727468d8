//! How the ranks that there are divide the work: what the user has fixed, and every way of doing the rest.

use super::{Auto, ConfigError, ParallelConfig, RawConfig, ShardingStrategy};

/// The stages of ZeRO.
const STAGES: std::ops::RangeInclusive<u64> = 0..=3;

/// The ranks that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// All of them.
    pub ranks: u32,
    /// Those of each machine, where all have as many and that is known.
    pub of_each_machine: Option<u32>,
}

/// Ranks along the ways that work on the same micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Together {
    context: u64,
    pipeline: u64,
    tensor: u64,
}

impl Together {
    fn ranks(self) -> u64 {
        self.context.saturating_mul(self.pipeline).saturating_mul(self.tensor)
    }

    /// Simpler divisions of so many ranks have the smaller number: fewer ways, and shorter ones of those that ask for more.
    fn complexity(self, ranks: u64) -> impl Ord {
        let data = ranks / self.ranks().max(1);
        let ways = [data, self.context, self.pipeline, self.tensor].iter().filter(|way| **way > 1).count();
        (ways, self.pipeline, self.context, self.tensor)
    }
}

impl ParallelConfig {
    /// Whether the division of the ranks is left to the planner.
    pub fn has_open_ways(&self) -> bool {
        let ways = [self.data_parallel, self.context_parallel, self.pipeline_parallel, self.tensor_parallel];
        ways.contains(&Some(Auto::Auto))
    }

    /// Whether what ranks share is left to the planner.
    pub fn has_open_stage(&self) -> bool {
        let said = self.zero_stage.and_then(Auto::set).is_some()
            || self.sharding_strategy.and_then(Auto::set).is_some();
        !said && (self.zero_stage.is_some() || self.sharding_strategy.is_some())
    }

    /// What is fixed of the ways that work on the same micro-batches.
    fn together(&self) -> Together {
        Together {
            context: self.context_parallel(),
            pipeline: self.pipeline_parallel(),
            tensor: self.tensor_parallel(),
        }
    }
}

impl RawConfig {
    /// The ranks of a run: those that were counted, or those that the configuration names.
    pub fn ranks(&self) -> u32 {
        self.started.map_or_else(|| self.parallel.mesh().size(), |started| started.ranks)
    }

    /// The configuration of a run on these ranks. Those that the other ways leave take micro-batches of their own. What is `auto`
    /// stays so, if there is a division of the ranks that can be.
    ///
    /// # Errors
    /// [`ConfigError`] where the ranks cannot be divided as it says, and all that [`validate`](RawConfig::validate) finds.
    pub fn on_ranks(&self, started: Started) -> Result<RawConfig, ConfigError> {
        let mut config = RawConfig { started: Some(started), ..self.clone() };
        let parallel = &config.parallel;
        let fixed = [parallel.context_parallel, parallel.pipeline_parallel, parallel.tensor_parallel];
        if !fixed.contains(&Some(Auto::Auto)) {
            config = config.divided(parallel.together(), started)?;
        }
        config.validate()?;
        config.divisions()?;
        Ok(config)
    }

    /// Every configuration that divides the ranks as this one says, with nothing about them left open, and can be: the simplest
    /// first.
    ///
    /// # Errors
    /// There is none: what is wrong with the simplest. Or ways are open, and nobody has counted the ranks.
    pub fn divisions(&self) -> Result<Vec<RawConfig>, ConfigError> {
        let parallel = &self.parallel;
        let meshes = match (self.started, parallel.has_open_ways()) {
            (Some(started), true) => self.meshes(started),
            (None, true) => return Err(self.not_counted()),
            (_, false) => vec![Ok(self.clone())],
        };
        let (mut all, mut wrong) = (Vec::new(), None);
        for mesh in meshes {
            let checked = mesh.and_then(|mesh| {
                mesh.validate()?;
                Ok(mesh)
            });
            match checked {
                Ok(mesh) => all.extend(mesh.with_stages()),
                Err(error) => wrong = wrong.or(Some(error)),
            }
        }
        match wrong {
            Some(error) if all.is_empty() => Err(error),
            _ => Ok(all),
        }
    }

    /// The same with each number of ranks along the open ways, the simplest first.
    fn meshes(&self, started: Started) -> Vec<Result<RawConfig, ConfigError>> {
        let ranks = u64::from(started.ranks);
        let divisors: Vec<u64> = (1..=ranks).filter(|way| ranks.is_multiple_of(*way)).collect();
        let parallel = &self.parallel;
        let along = |way: Option<Auto<u64>>, fixed: u64| match way {
            Some(Auto::Auto) => divisors.clone(),
            _ => vec![fixed],
        };
        let fixed = parallel.together();
        let mut all = Vec::new();
        for context in along(parallel.context_parallel, fixed.context) {
            for pipeline in along(parallel.pipeline_parallel, fixed.pipeline) {
                for tensor in along(parallel.tensor_parallel, fixed.tensor) {
                    all.push(Together { context, pipeline, tensor });
                }
            }
        }
        let data = parallel.data_parallel.and_then(Auto::set);
        let comes_out = |together: &Together| match data {
            Some(data) => data.saturating_mul(together.ranks()) == ranks,
            None => ranks.is_multiple_of(together.ranks()),
        };
        let simplest = all.first().copied().unwrap_or(fixed);
        all.retain(comes_out);
        all.sort_by_key(|together| together.complexity(ranks));
        if all.is_empty() {
            all.push(simplest);
        }
        all.into_iter().map(|together| self.divided(together, started)).collect()
    }

    /// The same with each stage of ZeRO that is left open.
    fn with_stages(self) -> Vec<RawConfig> {
        let of_stage = |stage: Option<u64>| {
            let mut own = self.clone();
            let parallel = &mut own.parallel;
            if parallel.zero_stage == Some(Auto::Auto) {
                parallel.zero_stage = None;
            }
            if parallel.sharding_strategy == Some(Auto::Auto) {
                parallel.sharding_strategy = None;
            }
            if let Some(stage) = stage {
                parallel.zero_stage = Some(Auto::Set(stage));
                // Where nothing is shared there are no groups.
                parallel.shard_size = parallel.shard_size.filter(|_| stage > 0);
            }
            own
        };
        let replicas = self.parallel.mesh().replicas();
        match self.parallel.has_open_stage() {
            true if replicas > 1 => STAGES.map(|stage| of_stage(Some(stage))).collect(),
            // A rank by itself shares nothing.
            true => vec![of_stage(Some(0))],
            false => vec![of_stage(None)],
        }
    }

    /// The same with so many ranks along each way, and what they leave data parallel.
    fn divided(&self, together: Together, started: Started) -> Result<RawConfig, ConfigError> {
        let ranks = u64::from(started.ranks);
        let mut own = self.clone();
        let parallel = &mut own.parallel;
        let said = parallel.data_parallel.and_then(Auto::set);
        match said {
            Some(data) if data.saturating_mul(together.ranks()) != ranks => {
                return Err(self.not_as_many(data, together, started));
            }
            None if !ranks.is_multiple_of(together.ranks()) => {
                return Err(self.left_over(together, started));
            }
            None => parallel.data_parallel = Some(Auto::Set(ranks / together.ranks())).filter(|_| ranks > 1),
            Some(_) => {}
        }
        let ways = [
            (&mut parallel.context_parallel, together.context),
            (&mut parallel.pipeline_parallel, together.pipeline),
            (&mut parallel.tensor_parallel, together.tensor),
        ];
        for (key, ranks) in ways {
            if *key == Some(Auto::Auto) {
                *key = Some(Auto::Set(ranks));
            }
        }
        let is_hybrid = parallel.sharding_strategy() == ShardingStrategy::HybridShard;
        if let (true, None, Some(machine)) = (is_hybrid, parallel.shard_size, started.of_each_machine) {
            // Those of a machine that hold the same weights.
            let replicas = u64::from(parallel.mesh().replicas());
            let parts = together.tensor.saturating_mul(parallel.expert_parallel()).max(1);
            parallel.shard_size = Some((u64::from(machine) / parts).clamp(1, replicas));
        }
        Ok(own)
    }

    fn not_as_many(&self, data: u64, together: Together, started: Started) -> ConfigError {
        let all = data.saturating_mul(together.ranks());
        let product = [
            (together.context, "context_parallel"),
            (together.pipeline, "pipeline_parallel"),
            (together.tensor, "tensor_parallel"),
        ];
        let factor = |(ranks, key): &(u64, &str)| (*ranks > 1).then(|| format!(" x {key} {ranks}"));
        let factors: String = product.iter().filter_map(factor).collect();
        let words = if factors.is_empty() { format!("is {data}") } else { format!("{data}{factors}") };
        ConfigError::Conflict {
            keys: vec![self.conflicting("parallel.data_parallel", data)],
            reason: format!("parallel.data_parallel {words}, and {}", were_started(started)),
            remedy: format!(
                "start {all} with --ranks, name a machine of {all} devices with --hardware, or leave the key away"
            ),
        }
    }

    fn left_over(&self, together: Together, started: Started) -> ConfigError {
        let all = together.ranks();
        let ways = [
            ("parallel.context_parallel", together.context),
            ("parallel.pipeline_parallel", together.pipeline),
            ("parallel.tensor_parallel", together.tensor),
        ];
        let several = ways.into_iter().filter(|(_, ranks)| *ranks > 1);
        ConfigError::Conflict {
            keys: several.map(|(key, ranks)| self.conflicting(key, ranks)).collect(),
            reason: format!(
                "the configuration divides sequences, layers and products among {all} ranks, and {}",
                were_started(started)
            ),
            remedy: format!(
                "start {all}, or a multiple, with --ranks, or name a machine of as many devices with --hardware"
            ),
        }
    }

    fn not_counted(&self) -> ConfigError {
        let parallel = &self.parallel;
        let ways = [
            ("parallel.data_parallel", parallel.data_parallel),
            ("parallel.context_parallel", parallel.context_parallel),
            ("parallel.pipeline_parallel", parallel.pipeline_parallel),
            ("parallel.tensor_parallel", parallel.tensor_parallel),
        ];
        let open = ways.into_iter().filter(|(_, way)| *way == Some(Auto::Auto));
        ConfigError::Conflict {
            keys: open.map(|(key, _)| self.conflicting(key, "auto")).collect(),
            reason: "how many ranks there are is not known".to_owned(),
            remedy: "give the number with --ranks".to_owned(),
        }
    }
}

fn were_started(started: Started) -> String {
    let ranks = started.ranks;
    format!("{ranks} rank{} started", if ranks == 1 { " was" } else { "s were" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(parallel: &str) -> RawConfig {
        let text = format!("model: x\ndata: {{sequence_length: 64}}\nparallel: {{{parallel}}}");
        RawConfig::from_str(&text, "test").unwrap()
    }

    fn on(parallel: &str, ranks: u32) -> Result<RawConfig, ConfigError> {
        config(parallel).on_ranks(Started { ranks, of_each_machine: Some(ranks) })
    }

    /// The divisions as data x context x pipeline x tensor / stage.
    fn divisions(config: &RawConfig) -> Vec<String> {
        let all = config.divisions().unwrap();
        let name = |config: &RawConfig| {
            let yaml = config.to_yaml().unwrap();
            assert!(!yaml.contains("auto"), "{yaml}");
            let (mesh, stage) = (config.parallel.mesh(), config.parallel.zero_stage());
            format!("{}x{}x{}x{}/{stage}", mesh.data, mesh.context, mesh.pipeline, mesh.tensor)
        };
        all.iter().map(name).collect()
    }

    /// The number of ranks is known before it is checked what they share.
    #[test]
    fn a_group_that_shares_is_one_of_the_ranks_that_were_started() {
        assert_eq!(on("shard_size: 2, zero_stage: 3", 4).unwrap().parallel.data_parallel(), 4);
        assert_eq!(on("sharding_strategy: hybrid_shard", 4).unwrap().parallel.shard_size, Some(4));
        // On one rank, or on as many as the document says, there is no such group.
        for refused in [
            config("shard_size: 2, zero_stage: 3").validate(),
            on("shard_size: 2, zero_stage: 3", 1).map(drop),
            on("shard_size: 2, zero_stage: 3", 3).map(drop),
        ] {
            assert!(refused.unwrap_err().to_string().contains("fall into no groups of 2"));
        }
    }

    #[test]
    fn ranks_that_are_not_those_of_the_configuration_are_refused() {
        let refused = |parallel, ranks| on(parallel, ranks).unwrap_err().to_string();
        let words = refused("data_parallel: 3, tensor_parallel: 2", 4);
        assert!(
            words.contains("parallel.data_parallel 3 x tensor_parallel 2, and 4 ranks were started; start 6")
        );
        let words = refused("tensor_parallel: 3", 4);
        assert!(words.contains("among 3 ranks, and 4 ranks were started; start 3"), "{words}");
        let words = refused("data_parallel: 3, tensor_parallel: auto", 4);
        assert!(words.contains("parallel.data_parallel is 3, and 4 ranks were started"), "{words}");
        let unknown = config("tensor_parallel: auto").divisions().unwrap_err().to_string();
        assert!(unknown.contains("give the number with --ranks"), "{unknown}");
        // What each division refuses, the simplest says.
        let refused = config("tensor_parallel: auto, shard_size: 3, zero_stage: 1");
        let refused = refused.on_ranks(Started { ranks: 4, of_each_machine: None }).unwrap_err().to_string();
        assert!(
            refused.contains("4 ranks hold the same weights, which fall into no groups of 3"),
            "{refused}"
        );
    }

    #[test]
    fn every_division_is_there_once_the_simplest_first() {
        let stages = ["4x1x1x1/0", "4x1x1x1/1", "4x1x1x1/2", "4x1x1x1/3"];
        assert_eq!(divisions(&on("zero_stage: auto", 4).unwrap()), stages);
        assert_eq!(divisions(&on("sharding_strategy: auto", 4).unwrap()), stages);
        assert_eq!(divisions(&on("sharding_strategy: auto, zero_stage: 2", 4).unwrap()), ["4x1x1x1/2"]);
        assert_eq!(divisions(&on("zero_stage: auto", 1).unwrap()), ["1x1x1x1/0"]);
        assert_eq!(
            divisions(&on("tensor_parallel: auto", 4).unwrap()),
            ["4x1x1x1/0", "1x1x1x4/0", "2x1x1x2/0"]
        );
        assert_eq!(
            divisions(&on("tensor_parallel: auto, pipeline_parallel: 2", 4).unwrap()),
            ["2x1x2x1/0", "1x1x2x2/0"]
        );
        assert_eq!(divisions(&on("data_parallel: 2, tensor_parallel: auto", 6).unwrap()), ["2x1x1x3/0"]);
        let all = "data_parallel: auto, context_parallel: auto, pipeline_parallel: auto, tensor_parallel: auto, zero_stage: auto";
        let all = divisions(&on(all, 8).unwrap());
        // 20 products of four numbers are 8; in four of them no two ranks hold the same weights.
        assert_eq!(all.len(), 16 * 4 + 4, "{all:?}");
        assert_eq!(all.iter().collect::<std::collections::BTreeSet<_>>().len(), all.len());
        assert_eq!(all.first().map(String::as_str), Some("8x1x1x1/0"));
    }
}
