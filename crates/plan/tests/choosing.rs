//! What the planner chooses, against choices that are worked out beside it: each form of checkpointing by a dry run of its
//! own, the settings of a step by what was written, the steps of a ladder one by one.

use std::collections::BTreeSet;

use plimsoll_device::DType;
use plimsoll_memory::Tier;
use plimsoll_model::{ModelSpec, catalogue};
use plimsoll_parallel::Mesh;
use plimsoll_plan::config::{Auto, GradientDtype, MasterWeights, MixedPrecision, RawConfig};
use plimsoll_plan::{
    Choice, DiskRates, DryRun, Limits, Resource, TrainingPlan, lighter_choices, loss_chunk_tokens,
};
use plimsoll_step::{
    Checkpointing, GradientClipping, Group, KeptLayers, Linears, LossScaling, NormSource, Offload,
    PipelineSchedule, Precision, Ranks, StepSettings, UpdateTiming,
};

use crate::common::machine;

fn spec() -> ModelSpec {
    ModelSpec { num_layers: 2, vocab_size: 4096, ..catalogue::find("smollm2-135m").unwrap() }
}

fn config(set: &[&str]) -> RawConfig {
    let mut config = RawConfig::from_str("model: m\ndata: {sequence_length: 64}", "test").unwrap();
    config.apply_set("memory.device_budget=64GiB").unwrap();
    set.iter().for_each(|assignment| config.apply_set(assignment).unwrap());
    config.validate().unwrap();
    config
}

fn plan_of(spec: &ModelSpec, set: &[&str]) -> TrainingPlan {
    TrainingPlan::new(&config(set), spec, &machine()).unwrap()
}

fn plan(set: &[&str]) -> TrainingPlan {
    plan_of(&spec(), set)
}

const HOME: &str =
    "memory.offload={optimizer: device, gradients: device, activations: device, parameters: device}";
const F32: &str = "training.mixed_precision=f32";

/// The arena of the candidate that is to be taken: of those that are as fast as the fastest but for a hundredth, the one
/// with the smallest.
fn smallest_of_the_fastest(candidates: &[Choice], within: u64) -> u64 {
    let fitting = || candidates.iter().filter(|choice| choice.peak_bytes() <= within);
    let fastest = fitting().map(|choice| choice.time.tokens_per_second).fold(0.0, f64::max);
    let as_fast = fitting().filter(|choice| choice.time.tokens_per_second * 1.01 >= fastest);
    as_fast.map(Choice::peak_bytes).min().unwrap()
}

#[test]
fn a_limit_on_the_arena_gets_the_best_form_of_checkpointing_under_it() {
    let spec = ModelSpec { num_layers: 6, ..spec() };
    let set = |form: &str| plan_of(&spec, &[F32, HOME, "training.batch_size=4", form]);
    let base = set("training.gradient_checkpointing=none").choice;
    let groups = [Group::Swiglu, Group::Norms, Group::Attention, Group::Qkv, Group::Ffn];
    let sets = (1..32).map(|set: usize| {
        let members = groups.into_iter().enumerate().filter(|(i, _)| (set >> i) % 2 == 1);
        Checkpointing::Selective(members.map(|(_, group)| group).collect())
    });
    let forms = [Checkpointing::None, Checkpointing::Full, Checkpointing::Sqrt].into_iter();
    let forms = forms.chain([2, 3, 4, 8].map(Checkpointing::Every)).chain(sets);
    let candidates: Vec<Choice> = forms
        .map(|checkpointing| {
            let settings = StepSettings { checkpointing, ..base.settings.clone() };
            Choice::new(&spec, settings, 1, &machine().rates).unwrap()
        })
        .collect();
    let mut peaks: Vec<u64> = candidates.iter().map(Choice::peak_bytes).collect();
    peaks.sort_unstable();
    peaks.dedup();
    // Nothing is searched where neither of the lightest forms fits.
    let of =
        |form| candidates.iter().find(|choice| choice.settings.checkpointing == form).unwrap().peak_bytes();
    let least = of(Checkpointing::Full).min(of(Checkpointing::Sqrt));
    peaks.retain(|peak| *peak >= least);
    assert!(peaks.len() > 9, "{}", peaks.len());
    for within in peaks.into_iter().step_by(3) {
        let chosen = set(&format!("training.gradient_checkpointing={{auto: {within}}}"));
        assert_eq!(chosen.peak_bytes(), smallest_of_the_fastest(&candidates, within), "{within}");
    }
}

/// A limit on the arena that no form of checkpointing keeps is a reason not to fit, with what the lightest needs; what is
/// offloaded comes back no further than it.
#[test]
fn a_limit_on_the_arena_that_no_form_keeps_is_refused() {
    let least = plan(&[F32, HOME, "training.batch_size=1", "training.gradient_checkpointing=full"]);
    let within = |bytes: u64, set: &[&str]| {
        let form = format!("training.gradient_checkpointing={{auto: {bytes}}}");
        plan(&[&[F32, "training.batch_size=1", &form], set].concat())
    };
    let short = within(least.peak_bytes() / 2, &[HOME]);
    assert!(!short.fits());
    let [shortage] = short.shortages()[..] else { panic!("{:?}", short.misfits()) };
    assert_eq!((shortage.resource, shortage.needed_bytes), (Resource::Arena, short.peak_bytes()));
    assert_eq!(shortage.allowed_bytes, least.peak_bytes() / 2);
    let words = short.misfits().concat();
    assert!(words.contains("training.gradient_checkpointing says {auto: "), "{words}");
    assert!(within(least.peak_bytes(), &[HOME]).fits());
    let less = least.peak_bytes() / 4 * 3;
    let away = within(less, &[]);
    assert!(away.fits() && away.peak_bytes() <= less, "{:?}", away.misfits());
}

#[test]
fn of_choices_that_are_as_fast_the_smallest_is_taken() {
    let first = |n| Checkpointing::Selective(Group::ALL.into_iter().take(n).collect());
    let forms = [Checkpointing::None, first(2), first(3), first(4), first(5)];
    let forms = forms.into_iter().chain([Checkpointing::Full, Checkpointing::Sqrt]);
    let base = plan(&[F32, HOME]).choice.settings;
    let mut candidates = Vec::new();
    for checkpointing in forms {
        for batch_size in [1, 2, 4, 8] {
            let loss_chunk_tokens = loss_chunk_tokens(4096, 64 * batch_size);
            let settings = StepSettings { checkpointing, batch_size, loss_chunk_tokens, ..base.clone() };
            candidates.push(Choice::new(&spec(), settings, 8 / batch_size, &machine().rates).unwrap());
        }
    }
    let chosen = plan(&[F32, HOME]);
    assert_eq!(chosen.peak_bytes(), smallest_of_the_fastest(&candidates, u64::MAX));
    let Choice { settings, accumulation, .. } = &chosen.choice;
    assert_eq!(settings.batch_size * accumulation, 8);
    // Where each pass brings weights or gradients, the fewest passes come first.
    for away in ["parameters", "gradients"] {
        let set = ["memory.offload.optimizer=device", "memory.offload.activations=device"];
        let away = format!("memory.offload.{away}=disk");
        let chosen = plan(&[&[F32, &away, "training.micro_batches_per_pass=1"], &set[..]].concat());
        assert_eq!((chosen.choice.settings.batch_size, chosen.choice.accumulation), (8, 1), "{away}");
    }
}

#[test]
fn what_is_written_is_what_the_step_gets() {
    let check = |set: &[&str], holds: fn(&StepSettings) -> bool| {
        let plan = plan(&[&[HOME, "training.batch_size=1"], set].concat());
        assert!(holds(&plan.choice.settings), "{set:?}: {:?}", plan.choice.settings);
    };
    check(&[], |s| s.document_end.is_none() && !s.document_starts && !s.target_weights);
    check(&["data.document_mask=true"], |s| s.document_end == Some(0) && !s.document_starts);
    check(&["data.format=chat"], |s| s.document_end.is_none() && s.document_starts && s.target_weights);
    check(&["data.format=chat", "data.document_mask=true"], |s| s.document_end.is_none());
    check(&["data.format=instruction", "data.packing=false"], |s| !s.document_starts && s.target_weights);
    check(&["training.max_gradient_norm=0"], |s| s.clipping == GradientClipping::None);
    check(&["training.max_gradient_norm=0.5"], |s| s.clipping == GradientClipping::GlobalNorm(0.5));
    check(&[F32], |s| s.loss_scaling.is_none() && s.update == UpdateTiming::AfterBackward);
    check(&["training.mixed_precision=bf16"], |s| s.loss_scaling.is_none());
    check(&["training.mixed_precision=fp16"], |s| s.loss_scaling == Some(LossScaling::default()));
    let timing = |mode| ["training.optimizer_in_backward=true", mode];
    check(&timing("training.in_backward_clipping=previous_norm"), |s| {
        s.update == UpdateTiming::InBackward(NormSource::PreviousStep)
    });
    check(&timing("training.max_gradient_norm=0"), |s| {
        s.update == UpdateTiming::InBackward(NormSource::SecondBackward)
    });
    check(&["training.loss_chunk_tokens=7", "training.mlp_chunk_tokens=5", "training.seed=3"], |s| {
        (s.loss_chunk_tokens, s.mlp_chunk_tokens, s.seed) == (7, Some(5), 3)
    });
    check(&["memory.kept_layers.gradients=1", "memory.kept_layers.activations=2"], |s| {
        s.kept_layers == KeptLayers { gradients: 1, activations: 2, ..KeptLayers::NONE }
    });
    check(&["training.batch_size=3"], |s| s.loss_chunk_tokens == 192);
}

/// A chunk is the largest power of two whose logits of four bytes take at most 32 MiB, of 16 tokens at least.
#[test]
fn logits_of_a_chunk_take_about_32_mib() {
    for ([vocab, tokens], expected) in [
        ([32_768, 4096], 256),
        ([32_768, 100], 100),
        ([49_152, 4096], 128),
        ([32_769, 4096], 128),
        ([262_144, 4096], 32),
        ([524_288, 4096], 16),
        ([1 << 24, 4096], 16),
        ([1, 1 << 40], 1 << 23),
        ([0, 4096], 4096),
        ([32_768, 0], 1),
    ] {
        assert_eq!(loss_chunk_tokens(vocab, tokens), expected, "{vocab} {tokens}");
    }
}

#[test]
fn a_precision_is_what_was_written_and_can_be_written_again() {
    use MixedPrecision::{Bf16, Fp8, Fp16};
    let narrow = Precision { weights: DType::Bf16, activations: DType::Bf16, ..Precision::F32 };
    let masters = Precision { master_weights: true, ..narrow };
    let bf16_gradients = |precision| Precision { gradients: DType::Bf16, ..precision };
    let fp8 = |precision| Precision { linears: Linears::Fp8, ..precision };
    let (f32, none) = (Some(MasterWeights::F32), Some(MasterWeights::None));
    let bf16 = "training.mixed_precision=bf16";
    let no_masters = "training.master_weights=none";
    let narrow_gradients = "training.gradient_dtype=bf16";
    let (lora, qlora) = ("training.method=lora", "training.method=qlora");
    let whole = "training.lora.modules_to_save=[embed_tokens]";
    let cases: [(&[&str], Precision, MixedPrecision, Option<MasterWeights>); 15] = [
        (&[F32], Precision::F32, MixedPrecision::F32, None),
        (&[], Precision::F32, MixedPrecision::F32, None),
        (&[bf16], masters, Bf16, f32),
        (&[bf16, narrow_gradients], bf16_gradients(masters), Bf16, f32),
        (&[bf16, no_masters], bf16_gradients(narrow), Bf16, none),
        (&[bf16, no_masters, "training.gradient_dtype=f32"], narrow, Bf16, none),
        (&["training.mixed_precision=fp16"], Precision::F16, Fp16, f32),
        (&["training.mixed_precision=fp16", narrow_gradients], bf16_gradients(Precision::F16), Fp16, f32),
        (&["training.mixed_precision=fp8"], Precision::FP8, Fp8, f32),
        (&["training.mixed_precision=fp8", no_masters], fp8(bf16_gradients(narrow)), Fp8, none),
        // What is frozen needs no master, and adapters are in f32.
        (&[lora, bf16], narrow, Bf16, none),
        (&[lora, bf16, whole], masters, Bf16, f32),
        (
            &[lora, "training.mixed_precision=fp16"],
            Precision { master_weights: false, ..Precision::F16 },
            Fp16,
            none,
        ),
        (&[lora], Precision::F32, MixedPrecision::F32, None),
        // Beside weights of four bits.
        (&[qlora], narrow, Bf16, none),
    ];
    for (set, precision, mixed, master_weights) in cases {
        let plan = plan(&[&[HOME, "training.batch_size=1"], set].concat());
        assert_eq!(plan.choice.settings.precision, precision, "{set:?}");
        let training = &plan.config.training;
        assert_eq!(training.mixed_precision().set(), Some(mixed), "{set:?}");
        assert_eq!(training.master_weights.map(|masters| masters.set().unwrap()), master_weights, "{set:?}");
        let gradients = match precision.gradients {
            DType::Bf16 => GradientDtype::Bf16,
            _ => GradientDtype::F32,
        };
        assert_eq!(training.gradient_dtype().set(), Some(gradients), "{set:?}");
        let again = TrainingPlan::new(&plan.config, &spec(), &machine()).unwrap();
        assert_eq!(again.choice.settings, plan.choice.settings, "{set:?}");
    }
}

#[test]
fn micro_batches_share_a_pass_where_no_bit_depends_on_it() {
    let untied = ModelSpec { tie_word_embeddings: false, ..spec() };
    let lora = "training.method=lora";
    let table = "training.lora.modules_to_save=[embed_tokens]";
    let of = |spec: &ModelSpec, steps: u64, away: &str, set: &[&str]| {
        let steps = format!("training.gradient_accumulation_steps={steps}");
        let away = format!("memory.offload={away}");
        let step = ["training.gradient_checkpointing=full", "training.batch_size=1", F32, &steps, &away];
        plan_of(spec, &[&step[..], set].concat()).choice.settings.micro_batches_per_pass
    };
    let parameters = "{optimizer: device, gradients: device, activations: device, parameters: disk}";
    let gradients = "{optimizer: device, gradients: disk, activations: device, parameters: device}";
    let optimizer = "{optimizer: disk, gradients: device, activations: device, parameters: device}";
    for (model, tied) in [(&spec(), true), (&untied, false)] {
        assert_eq!(of(model, 6, parameters, &[]), if tied { 1 } else { 6 });
        assert_eq!(of(model, 6, gradients, &[]), if tied { 1 } else { 6 });
        assert_eq!(of(model, 6, parameters, &[lora]), 6);
        assert_eq!(of(model, 6, parameters, &[lora, table]), if tied { 1 } else { 6 });
    }
    assert_eq!(of(&untied, 6, optimizer, &[]), 1);
    assert_eq!([32, 33].map(|steps| of(&untied, steps, parameters, &[])), [32, 1]);
}

/// A stage waits for the first micro-batch to come and for the last one to come back, in one of its runs of layers; for no update.
#[test]
fn the_stages_of_a_pipeline_wait_for_their_passes() {
    let (spec, rates) = (ModelSpec { num_layers: 8, ..spec() }, machine().rates);
    let mesh = Mesh { pipeline: 4, ..Mesh::ALONE };
    let of_rank = |rank, pipeline_schedule| StepSettings {
        ranks: Ranks { rank, mesh },
        pipeline_schedule,
        ..StepSettings::new(1, 64)
    };
    let one_run = PipelineSchedule::OneForwardOneBackward;
    for (schedule, runs) in [(one_run, 1.0), (PipelineSchedule::Interleaved(2), 2.0)] {
        for accumulation in [4, 12] {
            let run = |rank| {
                let settings = of_rank(rank, schedule);
                DryRun::timed_training(&spec, &settings, accumulation, &rates).unwrap()
            };
            let seconds = |run: &DryRun| {
                let step = run.times.unwrap().elapsed;
                step + (step - run.updates.elapsed) * 3.0 / (runs * accumulation as f64)
            };
            let slowest = (0..4).map(|rank| seconds(&run(rank))).fold(0.0, f64::max);
            let choice = Choice::new(&spec, of_rank(0, schedule), accumulation, &rates).unwrap();
            assert!((choice.time.step_seconds / slowest - 1.0).abs() < 1e-9, "{schedule:?} {accumulation}");
        }
    }
    // As many updates for three times the micro-batches.
    let [few, many] = [4, 12].map(|accumulation| {
        let run = DryRun::timed_training(&spec, &of_rank(0, one_run), accumulation, &rates).unwrap();
        (run.updates.elapsed, run.times.unwrap().elapsed - run.updates.elapsed)
    });
    assert!(few.0 > 0.0 && (many.0 / few.0 - 1.0).abs() < 1e-9, "{few:?} {many:?}");
    // The first one adds to no gradients.
    assert!((many.1 / few.1 / 3.0 - 1.0).abs() < 0.05, "{few:?} {many:?}");
}

/// No limit but that of the disk.
/// What is left open is taken where it is faster and there is room for it, and written down.
#[test]
fn exchanges_go_behind_the_computation_where_that_fits_and_is_faster() {
    let alike = [F32, HOME, "training.gradient_checkpointing=none", "training.batch_size=1"];
    for stage in ["parallel.zero_stage=1", "parallel.zero_stage=2", "parallel.zero_stage=3"] {
        let with = |more: &[&str]| plan(&[&alike[..], &["parallel.data_parallel=2", stage], more].concat());
        let [on, off] = ["true", "false"].map(|value| {
            with(&[
                "training.gradient_accumulation_steps=1",
                &format!("parallel.overlap_communication={value}"),
            ])
        });
        let auto = with(&["training.gradient_accumulation_steps=1"]);
        assert_eq!(on.choice.dry_run.moved, off.choice.dry_run.moved, "{stage}");
        // What a short update hides is less than what copies of the weights take.
        let faster = on.choice.time.step_seconds < off.choice.time.step_seconds;
        assert_eq!(faster, stage != "parallel.zero_stage=1", "{stage}");
        let expected = if faster { &on } else { &off };
        assert_eq!(auto.choice.settings, expected.choice.settings, "{stage}");
        assert_eq!(auto.config.parallel.overlap_communication().set(), Some(faster));
        assert!(!faster || on.choice.time.waiting_seconds < off.choice.time.waiting_seconds, "{stage}");
        if on.process_bytes() > off.process_bytes() {
            let budget = format!("memory.device_budget={}", on.process_bytes() - 1);
            let tight = with(&["training.gradient_accumulation_steps=1", &budget]);
            assert_eq!(tight.choice.settings, off.choice.settings, "{stage}");
            assert_eq!(tight.config.parallel.overlap_communication().set(), Some(false));
        }
    }
    assert!(plan(&alike).config.parallel.overlap_communication.is_none());
    let alone = plan(&[&alike[..], &["parallel.overlap_communication=true"]].concat());
    assert_eq!(alone.choice.peak_bytes(), plan(&alike).choice.peak_bytes());
}

fn limits(disk_bytes: u64) -> Limits {
    Limits {
        arena_bytes: u64::MAX,
        room_bytes: u64::MAX,
        target_bytes: u64::MAX,
        host_bytes: None,
        is_apart: false,
        narrow: None,
        memory_bytes: u64::MAX,
        address_bytes: u64::MAX,
        disk_bytes,
        pipeline_bytes_per_token: 0,
        worker_bytes: 0,
        reading_bytes: 0,
    }
}

/// Checkpointing, batch size, offload, and the layers whose optimizer states stay.
type Lighter = (Checkpointing, u64, Offload, u32);

#[test]
fn lighter_steps_do_the_same() {
    let spec = ModelSpec { num_layers: 6, ..spec() };
    let base = StepSettings { loss_chunk_tokens: 300, ..StepSettings::new(8, 64) };
    let groups =
        Checkpointing::Selective([Group::Swiglu, Group::Norms, Group::Attention].into_iter().collect());
    let forms = [Checkpointing::None, groups, Checkpointing::Full, Checkpointing::Sqrt];
    let rates = machine().rates;
    let of = |settings: &StepSettings, limits: Limits| {
        let own = Choice::new(&spec, settings.clone(), 3, &rates).unwrap();
        let found = lighter_choices(&spec, &own, &rates, limits, 1).unwrap();
        let memory: Vec<u64> = found.iter().map(|choice| limits.memory(choice)).collect();
        assert!(memory.is_sorted_by(|a, b| a >= b) && memory[0] < limits.memory(&own));
        for choice in &found {
            let StepSettings { checkpointing, batch_size, offload, kept_layers, .. } = choice.settings;
            assert_eq!(batch_size * choice.accumulation, 24);
            let loss_chunk_tokens = 300.min(64 * batch_size);
            let same = StepSettings {
                checkpointing,
                batch_size,
                offload,
                kept_layers,
                loss_chunk_tokens,
                micro_batches_per_pass: 1,
                ..settings.clone()
            };
            assert_eq!(choice.settings, same);
        }
        found
            .into_iter()
            .map(|choice| {
                let StepSettings { checkpointing, batch_size, offload, kept_layers, .. } = choice.settings;
                (checkpointing, batch_size, offload, kept_layers.optimizer)
            })
            .collect::<Vec<Lighter>>()
    };
    // The forms of checkpointing with each batch that divides 24, but for what there is; further away, what is left on the
    // device goes to the disk, a kind more each time, as long as that needs less than all the others.
    let all = |offload, kept| {
        forms.iter().flat_map(move |form| [1, 2, 4, 8].map(|size| (*form, size, offload, kept)))
    };
    let own = (Checkpointing::None, 8);
    let others = |offload, kept: &[u32], own_kept| {
        let all = kept.iter().flat_map(|kept| all(offload, *kept));
        all.filter(|(form, size, _, kept)| ((*form, *size), *kept) != (own, own_kept)).collect::<Vec<_>>()
    };
    let further = |offload| (Checkpointing::Full, 1, offload, 0);
    let optimizer = Offload { optimizer: Tier::Disk, ..Offload::NONE };
    let gradients = Offload { gradients: Tier::Disk, ..optimizer };
    let activations = Offload { activations: Tier::Disk, ..gradients };
    let parameters = Offload { parameters: Tier::Disk, ..activations };
    let waits = Offload { prefetch: false, ..parameters };
    let steps = [gradients, activations, parameters, waits].map(further);
    let same = |found: &[Lighter], expected: &[Lighter]| {
        found.len() == expected.len() && expected.iter().all(|one| found.contains(one))
    };
    let home = others(Offload::NONE, &[0], 0);
    assert!(same(&of(&base, limits(0)), &home));
    // One micro-batch in a pass needs less than two.
    let two = StepSettings { micro_batches_per_pass: 2, ..base.clone() };
    assert!(same(&of(&two, limits(0)), &all(Offload::NONE, 0).collect::<Vec<_>>()));
    let found = of(&base, limits(u64::MAX));
    assert!(same(&found, &[&home[..], &[further(optimizer)], &steps].concat()), "{found:?}");
    assert_eq!(found.last(), Some(&further(waits)));
    // Where three layers keep their states, they may go too, if the disk is large enough for them.
    let kept = KeptLayers { optimizer: 3, ..KeptLayers::NONE };
    let kept = StepSettings { offload: optimizer, kept_layers: kept, ..base.clone() };
    let expected = [&others(optimizer, &[3, 0], 3)[..], &steps].concat();
    assert!(same(&of(&kept, limits(u64::MAX)), &expected));
    assert!(same(&of(&kept, limits(0)), &others(optimizer, &[3], 3)));
}

#[test]
fn where_nothing_else_fits_there_is_one_buffer_of_each_kind() {
    let spec = ModelSpec { num_layers: 6, ..spec() };
    let of = |own: &str| {
        let away = "memory.offload={optimizer: disk, gradients: disk, activations: disk, parameters: disk}";
        let (batch, form) = ("training.batch_size=1", "training.gradient_checkpointing=full");
        plan_of(&spec, &[F32, away, batch, form, own])
    };
    let (several, one) = (of("memory.prefetch=true"), of("memory.prefetch=false"));
    assert!(one.process_bytes() < several.process_bytes());
    assert!(one.choice.time.step_seconds > several.choice.time.step_seconds);
    // Left open, it is given up for the last byte.
    let within = |bytes: u64| of(&format!("memory.device_budget={bytes}"));
    let prefetches = within(several.process_bytes());
    assert!(prefetches.fits() && prefetches.choice.settings.offload.prefetch);
    let waits = within(several.process_bytes() - 1);
    assert!(waits.fits() && !waits.choice.settings.offload.prefetch);
    assert_eq!(waits.config.memory.prefetch(), Auto::Set(false));
    assert!(within(one.process_bytes()).fits());
    assert!(!within(one.process_bytes() - 1).fits());
}

/// The plan of the ladder's first rung: everything at home, in batches of eight.
fn roomy(spec: &ModelSpec) -> TrainingPlan {
    let set = [F32, HOME, "training.batch_size=8", "training.gradient_checkpointing=none"];
    plan_of(spec, &set)
}

#[test]
fn a_ladder_goes_down_by_whole_rungs_to_the_smallest() {
    let spec = ModelSpec { num_layers: 8, ..spec() };
    let first = roomy(&spec);
    let limits = first.limits;
    let lighter = lighter_choices(&spec, &first.choice, &machine().rates, limits, 1).unwrap();
    let memory = |choice: &Choice| limits.memory(choice);
    let ladder = first.clone().ladder().unwrap();
    assert_eq!(ladder[0].choice.settings, first.choice.settings);
    assert!(ladder.len() > 3, "{}", ladder.len());
    let mut above = memory(&first.choice);
    for (i, rung) in ladder.iter().enumerate().skip(1) {
        // The fastest of those that need at most 85 % of the rung above.
        let most = above * 85 / 100;
        let fitting = lighter.iter().filter(|choice| memory(choice) <= most);
        let fastest = fitting.map(|choice| choice.time.tokens_per_second).reduce(f64::max);
        match fastest {
            Some(fastest) => {
                assert!(memory(&rung.choice) <= most);
                assert_eq!(rung.choice.time.tokens_per_second, fastest);
            }
            None => assert_eq!(i + 1, ladder.len()),
        }
        above = memory(&rung.choice);
        assert!(rung.alternatives.is_empty() && rung.refusal.is_none());
        assert_eq!(rung.config.training.batch_size().set(), Some(rung.choice.settings.batch_size));
    }
    assert_eq!(Some(above), lighter.iter().map(memory).min());
}

#[test]
fn a_ladder_of_one_rung_where_nothing_is_smaller() {
    let smallest =
        ["training.batch_size=1", "training.gradient_accumulation_steps=1", "memory.disk_budget=0"];
    let form = "training.gradient_checkpointing={selective: [swiglu, norms, attention]}";
    let set = [F32, HOME, form];
    let spec = ModelSpec { num_layers: 6, ..spec() };
    let plan = plan_of(&spec, &[&set[..], &smallest].concat());
    assert_eq!(plan.ladder().unwrap().len(), 1);
}

/// Rows of an untied embedding's gradient are kept of every micro-batch where gradients live elsewhere, however many.
#[test]
fn rows_that_were_looked_up_take_their_room() {
    let untied = ModelSpec { tie_word_embeddings: false, ..spec() };
    let peak = |micro_batches: u64| {
        let times = format!("training.gradient_accumulation_steps={micro_batches}");
        let alone = "training.micro_batches_per_pass=1";
        let set = [F32, "training.batch_size=1", "memory.offload.gradients=disk", &times, alone];
        plan_of(&untied, &set).choice.dry_run.peak_bytes()
    };
    let sequence = plan_of(&untied, &[F32, "training.batch_size=1"]).choice.settings.sequence_length;
    // The last one's are where they were made.
    let each = sequence * 4 * (untied.hidden_size + 1);
    assert_eq!(peak(1001) - peak(1000), each);
    assert!(peak(2) - peak(1) <= each);
}

/// What passes share saves time by what is not brought again: where less than a hundredth of it was waited for, nothing is
/// shared.
#[test]
fn a_pass_is_shared_where_that_saves_a_hundredth_of_the_time() {
    let untied = ModelSpec { tie_word_embeddings: false, ..spec() };
    let away = "memory.offload={optimizer: device, gradients: device, activations: device, parameters: disk}";
    let step = [
        "training.gradient_checkpointing=full",
        "training.batch_size=1",
        F32,
        away,
        "training.gradient_accumulation_steps=6",
    ];
    let of = |read: f64, set: &[&str]| {
        let mut machine = machine();
        machine.rates.disk = DiskRates { read, write: read };
        TrainingPlan::new(&config(&[&step[..], set].concat()), &untied, &machine).unwrap().choice
    };
    for (read, gain, shared) in [(2e9, 1.01..2.0, 6), (1e11, 0.99..1.01, 1)] {
        let [one, six] = ["1", "6"].map(|n| of(read, &[&format!("training.micro_batches_per_pass={n}")]));
        let faster = six.time.tokens_per_second / one.time.tokens_per_second;
        assert!(gain.contains(&faster), "{read}: {faster} of {}", one.time.tokens_per_second);
        assert_eq!(of(read, &[]).settings.micro_batches_per_pass, shared);
    }
}

/// Where a kind of tensor lives, and how many of its layers stay.
type Place = fn(&mut StepSettings) -> (&mut Tier, &mut u32);

/// What may leave the device, in the order in which it does.
const KINDS: [Place; 4] = [
    |s| (&mut s.offload.optimizer, &mut s.kept_layers.optimizer),
    |s| (&mut s.offload.gradients, &mut s.kept_layers.gradients),
    |s| (&mut s.offload.activations, &mut s.kept_layers.activations),
    |s| (&mut s.offload.parameters, &mut s.kept_layers.parameters),
];

#[test]
fn what_spares_most_waiting_for_a_byte_comes_back_first() {
    let spec = ModelSpec { num_layers: 12, ..spec() };
    let mut first = BTreeSet::new();
    for mib in [160, 180, 220, 360] {
        let set = [F32, "data.sequence_length=128", &format!("memory.device_budget={mib}MiB")];
        let plan = plan_of(&spec, &set);
        assert!(plan.fits(), "{mib}");
        let fits = |choice: &Choice| plan.limits.memory(choice) <= plan.limits.target_bytes;
        let of = |settings| Choice::new(&spec, settings, plan.choice.accumulation, &machine().rates).unwrap();
        // All that had left before anything came back.
        let mut settings = plan.choice.settings.clone();
        let last = (0..4).rfind(|kind| *KINDS[*kind](&mut settings).0 == Tier::Disk).unwrap();
        settings.kept_layers = KeptLayers::NONE;
        KINDS[..=last].iter().for_each(|kind| *kind(&mut settings).0 = Tier::Disk);
        let away = of(settings.clone());
        let home = |kind: usize| {
            let mut settings = settings.clone();
            *KINDS[kind](&mut settings).0 = Tier::Device;
            of(settings)
        };
        let worth = |kind: &usize| {
            let home = home(*kind);
            let seconds = away.time.step_seconds - home.time.step_seconds;
            seconds / plan.limits.memory(&home).saturating_sub(plan.limits.memory(&away)).max(1) as f64
        };
        let best = (0..=last).max_by(|a, b| worth(a).total_cmp(&worth(b))).unwrap();
        let mut chosen = plan.choice.settings.clone();
        let (tier, kept) = KINDS[best](&mut chosen);
        if fits(&home(best)) {
            assert_eq!(*tier, Tier::Device, "{mib}");
        } else {
            let with = |layers| {
                let mut settings = settings.clone();
                *KINDS[best](&mut settings).1 = layers;
                fits(&of(settings))
            };
            assert!(*tier == Tier::Disk && with(*kept) && !with(*kept + 1), "{mib}: {kept}");
        }
        first.insert((best, last));
    }
    // Weights, which every pass reads twice and the update once more, before gradients, which are written back behind the
    // computation; and those before the states of the optimizer.
    assert_eq!(first.into_iter().collect::<Vec<_>>(), [(1, 1), (3, 3)]);
}

/// What is decided for a device without bf16 can be written down and planned again.
#[test]
fn what_was_decided_in_fp16_can_be_decided_again() {
    let catalogue = plimsoll_plan::Catalogue::known();
    let machine = catalogue.target("t4").unwrap().machine(0);
    let norm = "training.max_gradient_norm=0";
    for (set, precision) in [
        (vec!["training.method=lora"], MixedPrecision::Fp16),
        (vec!["training.mixed_precision=fp16"], MixedPrecision::Fp16),
        // Scaled gradients are all wanted before the first update.
        (vec!["training.optimizer_in_backward=true", norm], MixedPrecision::F32),
    ] {
        let set: Vec<&str> = set.into_iter().chain(["training.batch_size=2"]).collect();
        let plan = TrainingPlan::new(&config(&set), &spec(), &machine).unwrap();
        assert_eq!(plan.config.training.mixed_precision().set(), Some(precision), "{set:?}");
        let written = RawConfig::from_str(&plan.config.to_yaml().unwrap(), "again").unwrap();
        written.validate().unwrap_or_else(|error| panic!("{set:?}: {error:?}"));
        let again = TrainingPlan::new(&written, &spec(), &machine).unwrap();
        assert_eq!(again.choice.settings, plan.choice.settings, "{set:?}");
    }
}

/// Positions that were never learned are refused before anything is planned.
#[test]
fn sequences_are_no_longer_than_learned_positions() {
    let gpt2 = catalogue::find("gpt2").unwrap();
    let with = |tokens: &str| TrainingPlan::new(&config(&[tokens]), &gpt2, &machine());
    assert!(with("data.sequence_length=1024").is_ok());
    let error = with("data.sequence_length=1025").unwrap_err().to_string();
    assert!(error.contains("1025") && error.contains("1024 positions"), "{error}");
}
