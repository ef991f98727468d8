//! Schedules written out, and what is derived from them.

use plimsoll_model::{Parameter, Role, catalogue};

use super::*;
use crate::OptimizerSettings;
use crate::tier::{Pieces, is_matrix};

const UPDATE: Completion = Completion::Update(Update { lr: 1e-3, step: 1 });

/// Both layers, as one segment.
const BOTH: Range<u32> = 0..2;

fn parameter(block: BlockId, role: Role, shape: &[u64]) -> Parameter {
    Parameter { name: format!("{block:?}.{role:?}"), block, role, shape: shape.to_vec() }
}

/// Tables of two pieces, and two layers.
fn parts(tied: bool) -> Parts {
    let mut trained = vec![parameter(BlockId::Embedding, Role::TokenEmbedding, &[2048, 8])];
    for layer in (0..2).map(BlockId::Layer) {
        trained.push(parameter(layer, Role::AttentionNorm, &[8]));
        trained.push(parameter(layer, Role::QProj, &[8, 8]));
    }
    trained.push(parameter(BlockId::Head, Role::FinalNorm, &[8]));
    trained.extend((!tied).then(|| parameter(BlockId::Head, Role::LmHead, &[2048, 8])));
    Parts::new(&trained, Pieces::of_bytes(0, 1), &OptimizerSettings::default().kind, 1)
}

fn unit(unit: Unit) -> String {
    match unit {
        Unit::Layer(layer) => format!("{layer}"),
        Unit::Piece(block, piece) => format!("{block:?}.{piece}"),
        Unit::Expert(layer, expert, role) => format!("{layer}.{expert}.{}", role.name()),
        Unit::Rest(block) => format!("{block:?}"),
    }
}

/// A word for each action.
fn words(schedule: &Schedule) -> Vec<String> {
    let word = |entry: &Entry| match entry.action {
        Action::Embed { micro_batch } => format!("embed:{micro_batch}"),
        Action::EmbedPiece { unit: of, .. } => format!("embed {}", unit(of)),
        Action::Forward { layer, micro_batch, .. } => format!("forward {layer}:{micro_batch}"),
        Action::Enter { micro_batch } => format!("enter:{micro_batch}"),
        Action::Number { number } => format!("number {number}"),
        Action::Exchange(Exchange { send, receive }) => {
            let words = |of: Option<(Side, usize)>| {
                of.map_or("-".to_owned(), |(side, lane)| format!("{side:?}:{lane}"))
            };
            format!("{} {}", words(send), words(receive))
        }
        Action::Leave { micro_batch } => format!("leave:{micro_batch}"),
        Action::Tie { unit: of } => format!("tie {}", unit(of)),
        Action::Follow { unit: of, takes } => format!("{} {}", if takes { "take" } else { "give" }, unit(of)),
        Action::Loss { micro_batch } => format!("loss:{micro_batch}"),
        Action::LossBegin { micro_batch } => format!("begin:{micro_batch}"),
        Action::LossPiece { unit: of, .. } => format!("logits {}", unit(of)),
        Action::LossTotal { .. } => "total".into(),
        Action::LossBackward { unit: of, .. } => format!("head {}", unit(of)),
        Action::LossEnd { micro_batch } => format!("end:{micro_batch}"),
        Action::PrefetchKept { segment, micro_batch } => format!("kept {segment}:{micro_batch}"),
        Action::Recompute { layer, micro_batch, .. } => format!("again {layer}:{micro_batch}"),
        Action::Backward { layer, micro_batch, .. } => format!("backward {layer}:{micro_batch}"),
        Action::EmbedBackward { micro_batch } => format!("embedding:{micro_batch}"),
        Action::Scatter { unit: of, micro_batch, .. } => format!("scatter {}:{micro_batch}", unit(of)),
        Action::GatherLookedUp { unit: of } => format!("rows {}", unit(of)),
        Action::AddTerms { unit: of } => format!("terms {}", unit(of)),
        Action::Reduce { unit: of } => format!("reduce {}", unit(of)),
        Action::BeginReduce { unit: of } => format!("send {}", unit(of)),
        Action::EndReduce { unit: of } => format!("add {}", unit(of)),
        Action::Sum { unit: of } => format!("sum {}", unit(of)),
        Action::AllGather { unit: of } => format!("all-gather {}", unit(of)),
        Action::BeginAllGather { unit: of } => format!("begin all-gather {}", unit(of)),
        Action::EndAllGather => "end all-gather".into(),
        Action::Measure { unit: of } => format!("norm {}", unit(of)),
        Action::Update { unit: of, part, .. } => format!("update {}/{part}", unit(of)),
        Action::Free { unit: of } => format!("free {}", unit(of)),
    };
    schedule.entries().iter().map(word).collect()
}

fn shape<'s>(parts: &'s Parts, segments: &'s [Range<u32>], micro_batches: usize) -> PassShape<'s> {
    let (loss, embedding) = (LossForm::Whole, EmbeddingGradient::Whole);
    let ranks = BetweenRanks::default();
    let (chunks, embedding_pieces) = (false, 0);
    static WHOLE: ModelPart = ModelPart::WHOLE;
    let (part, tied) = (&WHOLE, None);
    PassShape { segments, micro_batches, chunks, embedding_pieces, loss, embedding, parts, ranks, part, tied }
}

#[test]
fn a_pass_goes_forward_and_back_and_leaves_gradients() {
    let parts = parts(true);
    let schedule = Schedule::pass(&shape(&parts, &[0..1, 1..2], 1), Some(Completion::Keep));
    let expected = "embed:0 | forward 0:0 | forward 1:0 | loss:0 | norm Head | kept 0:0 | backward 1:0 | norm 1 | \
                    backward 0:0 | norm 0 | embedding:0 | norm Embedding.0 | norm Embedding.1";
    assert_eq!(words(&schedule).join(" | "), expected);
    // A layer stays for its way back; then the first one is brought for the next pass.
    assert_eq!(schedule.weights().map(unit).collect::<Vec<_>>(), ["0", "1", "0", "0"]);
    let gradients: Vec<_> = schedule.gradients().map(|(of, freed)| (unit(of), freed)).collect();
    let expected = ["Head", "1", "0", "Embedding.0", "Embedding.1"].map(|of| (of.to_owned(), false));
    assert_eq!(gradients, expected);
}

/// What a rank has sent is added when the next unit has been backward, and what others update comes behind the next update.
#[test]
fn exchanges_are_begun_before_the_work_that_hides_them() {
    let parts = parts(true);
    let ranks =
        BetweenRanks { reduce_each_pass: true, share_updates: true, overlap: true, ..Default::default() };
    let shape = PassShape { ranks, ..shape(&parts, &[0..1, 1..2], 1) };
    let schedule = Schedule::pass(&shape, Some(Completion::Keep));
    let expected = "embed:0 | forward 0:0 | forward 1:0 | loss:0 | send Head | kept 0:0 | backward 1:0 | \
                    add Head | norm Head | send 1 | backward 0:0 | add 1 | norm 1 | send 0 | embedding:0 | \
                    add 0 | norm 0 | send Embedding.0 | add Embedding.0 | norm Embedding.0 | \
                    send Embedding.1 | add Embedding.1 | norm Embedding.1";
    assert_eq!(words(&schedule).join(" | "), expected);
    let Completion::Update(numbers) = UPDATE else { unreachable!() };
    let spec = ModelSpec { num_layers: 2, ..catalogue::find("smollm2-135m").unwrap() };
    let updates = words(&Schedule::updates(&spec, &parts, ranks, false, numbers));
    let layers = updates.iter().skip_while(|word| **word != "update 0/0").take(10).cloned();
    let expected = "update 0/0 | update 0/1 | end all-gather | begin all-gather 0 | free 0 | update 1/0 | \
                    update 1/1 | end all-gather | begin all-gather 1 | free 1";
    assert_eq!(layers.collect::<Vec<_>>().join(" | "), expected);
    assert_eq!(updates.last().map(String::as_str), Some("end all-gather"));
    // In the backward pass an update comes with the sum that it needs.
    let words = words(&Schedule::pass(&shape, Some(UPDATE))).join(" | ");
    let expected =
        "send 1 | backward 0:0 | add 1 | norm 1 | update 1/0 | update 1/1 | all-gather 1 | free 1 | send 0";
    assert!(words.contains(expected), "{words}");
}

#[test]
fn micro_batches_go_through_a_segment_together() {
    let parts = parts(true);
    let schedule = Schedule::pass(&shape(&parts, &[BOTH], 2), None);
    let expected = "embed:0 | embed:1 | forward 0:0 | forward 1:0 | forward 0:1 | forward 1:1 | loss:0 | loss:1 | \
                    kept 0:1 | again 0:0 | backward 1:0 | backward 0:0 | again 0:1 | backward 1:1 | \
                    backward 0:1 | embedding:0 | embedding:1";
    assert_eq!(words(&schedule).join(" | "), expected);
    let weights: Vec<_> = schedule.weights().map(unit).collect();
    assert_eq!(weights, ["0", "1", "0", "1", "0", "1", "0", "1", "0", "0"]);
}

#[test]
fn updates_in_the_backward_pass_free_what_they_have_used() {
    let parts = parts(false);
    let (loss, embedding) = (LossForm::Pieces(BlockId::Head, 2), EmbeddingGradient::LookedUp(2));
    let shape = PassShape { loss, embedding, ..shape(&parts, &[0..1, 1..2], 1) };
    let schedule = Schedule::pass(&shape, Some(UPDATE));
    let done = |of: &str, count: usize| {
        let updates = (0..count).map(|part| format!("update {of}/{part} | ")).collect::<String>();
        format!("norm {of} | {updates}free {of}")
    };
    let pieces = |first: &str, block: &str| {
        let piece = |piece| format!("{first} {block}.{piece} | {}", done(&format!("{block}.{piece}"), 1));
        format!("{} | {}", piece(0), piece(1))
    };
    let expected = format!(
        "embed:0 | forward 0:0 | forward 1:0 | begin:0 | logits Head.0 | logits Head.1 | total | {} | end:0 | {} | \
         kept 0:0 | backward 1:0 | {} | backward 0:0 | {} | embedding:0 | {}",
        pieces("head", "Head"),
        done("Head", 1),
        done("1", 2),
        done("0", 2),
        pieces("rows", "Embedding"),
    );
    assert_eq!(words(&schedule).join(" | "), expected);
    // Every gradient that is begun is given back, and every matrix that is held to be updated is changed.
    assert!(schedule.gradients().all(|(_, freed)| freed));
    let changed =
        schedule.entries().iter().filter_map(|entry| entry.weights).filter(|hold| hold.last && hold.ends);
    let expected = ["Head.0", "Head.1", "1", "0", "Embedding.0", "Embedding.1"];
    assert_eq!(changed.map(|hold| unit(hold.unit)).collect::<Vec<_>>(), expected);
}

#[test]
fn what_is_held_is_taken_once_and_released_once() {
    let parts = parts(true);
    for segments in [vec![0..1, 1..2], vec![BOTH]] {
        for (micro_batches, completion) in [(1, Some(UPDATE)), (3, Some(Completion::Measure)), (2, None)] {
            let (loss, embedding) =
                (LossForm::Pieces(BlockId::Embedding, 2), EmbeddingGradient::Scattered(2));
            let shape = PassShape { loss, embedding, ..shape(&parts, &segments, micro_batches) };
            let schedule = Schedule::pass(&shape, completion);
            for holds in [|entry: &Entry| entry.weights, |entry: &Entry| entry.gradients] {
                let mut held = None;
                for hold in schedule.entries().iter().filter_map(holds) {
                    assert_eq!(held.is_none(), hold.first, "{hold:?}");
                    held = Some(hold.unit).filter(|_| !hold.last);
                }
                assert_eq!(held, None);
            }
        }
    }
}

#[test]
fn adapters_are_updated_without_the_weights_beside_them() {
    let adapter = parameter(
        BlockId::Layer(0),
        Role::Lora(plimsoll_model::LoraPart::A, plimsoll_model::Adapted::QProj),
        &[2, 8],
    );
    assert!(!is_matrix(&adapter));
    let parts = Parts::new(&[adapter], Pieces::of_bytes(0, 1), &OptimizerSettings::default().kind, 1);
    let Completion::Update(numbers) = UPDATE else { return };
    let entries = [Action::Update { unit: Unit::Layer(0), part: 0, numbers }];
    assert_eq!(Schedule::new(entries.to_vec(), &parts, BetweenRanks::default()).weights().count(), 0);
}

/// Every pass adds its gradients to the sums, and what is complete goes to all ranks and comes back as weights.
#[test]
fn ranks_add_up_gradients_and_share_out_updates() {
    let parts = parts(true);
    let of = |ranks, completion| {
        let shape = PassShape { ranks, ..shape(&parts, &[0..1, 1..2], 1) };
        words(&Schedule::pass(&shape, completion)).join(" | ")
    };
    let ranks = BetweenRanks { reduce_each_pass: true, share_updates: true, ..BetweenRanks::default() };
    let complete = of(ranks, Some(UPDATE));
    let layer = "backward 1:0 | reduce 1 | norm 1 | update 1/0 | update 1/1 | all-gather 1 | free 1";
    assert!(complete.contains(layer), "{complete}");
    assert!(of(ranks, None).contains("backward 1:0 | reduce 1 | backward 0:0"), "{}", of(ranks, None));
    let replicated = BetweenRanks { sum_once: true, ..BetweenRanks::default() };
    let once = of(replicated, Some(Completion::Keep));
    assert!(once.contains("backward 1:0 | sum 1 | norm 1 | backward 0:0"), "{once}");
    assert!(!of(replicated, None).contains("sum"));
}

/// A layer that ranks share comes whole for its products and is given back; what is updated is a rank's own rows. The next pass
/// begins with the embedding.
#[test]
fn weights_that_ranks_share_come_whole_for_products_alone() {
    let parts = parts(false);
    let ranks = BetweenRanks {
        reduce_each_pass: true,
        share_updates: true,
        share_weights: true,
        ..BetweenRanks::default()
    };
    let loss = LossForm::Pieces(BlockId::Head, 2);
    let shape = PassShape { ranks, embedding_pieces: 2, loss, ..shape(&parts, &[0..1, 1..2], 1) };
    let schedule = Schedule::pass(&shape, Some(UPDATE));
    let held = |entry: &Entry| {
        let hold = entry.weights.filter(|hold| hold.first)?;
        Some(format!("{} {:?}{}", unit(hold.unit), hold.form, if hold.ends { " changed" } else { "" }))
    };
    let held: Vec<String> = schedule.entries().iter().filter_map(held).collect();
    let table =
        |block: &str, form: &str| (0..2).map(|piece| format!("{block}.{piece} {form}")).collect::<Vec<_>>();
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let head = (0..2)
        .flat_map(|piece| words(&[&format!("Head.{piece} Whole"), &format!("Head.{piece} Own changed")]));
    let expected = [
        table("Embedding", "Whole"),
        words(&["0 Whole", "1 Whole"]),
        table("Head", "Whole"),
        head.collect(),
        words(&["1 Whole", "1 Own changed", "0 Whole", "0 Own changed"]),
        table("Embedding", "Own changed"),
    ];
    assert_eq!(held, expected.concat());
    assert_eq!(schedule.weights().last(), Some(Unit::Piece(BlockId::Embedding, 0)));
}

/// The chunks of a sequence go forward one after the other and come back from the last one on; each has its own turn at the head.
#[test]
fn chunks_of_a_sequence_come_back_from_the_last_one() {
    let parts = parts(true);
    let (loss, embedding) = (LossForm::Pieces(BlockId::Embedding, 2), EmbeddingGradient::Scattered(2));
    let shape = PassShape { chunks: true, loss, embedding, ..shape(&parts, &[0..1, 1..2], 2) };
    let schedule = Schedule::pass(&shape, Some(Completion::Keep));
    let loss = |chunk: u32| {
        let both = |first: &str| format!("{first} Embedding.0 | {first} Embedding.1");
        format!("begin:{chunk} | {} | total | {} | end:{chunk}", both("logits"), both("head"))
    };
    let expected = format!(
        "embed:0 | embed:1 | forward 0:0 | forward 0:1 | forward 1:0 | forward 1:1 | {} | {} | norm Head | \
         kept 1:0 | backward 1:1 | kept 0:1 | backward 1:0 | norm 1 | kept 0:0 | backward 0:1 | backward 0:0 | norm 0 | \
         embedding:0 | scatter Embedding.0:0 | scatter Embedding.1:0 | \
         embedding:1 | scatter Embedding.0:1 | norm Embedding.0 | scatter Embedding.1:1 | norm Embedding.1",
        loss(0),
        loss(1),
    );
    assert_eq!(words(&schedule).join(" | "), expected);
}

/// Where each pass has gradients of its own, the backward pass holds none of those below the device.
#[test]
fn what_a_pass_writes_waits_for_nothing_below_the_device() {
    let parts = parts(true);
    let held = |ranks| {
        let shape = PassShape { ranks, ..shape(&parts, &[0..1, 1..2], 1) };
        Schedule::pass(&shape, None).gradients().map(|(unit, _)| unit).collect::<Vec<_>>()
    };
    assert_eq!(held(BetweenRanks::default()), [Unit::Layer(1), Unit::Layer(0)]);
    let each_pass = BetweenRanks { reduce_each_pass: true, ..BetweenRanks::default() };
    let pieces = (0..2).map(|piece| Unit::Piece(BlockId::Embedding, piece));
    let rest = [Unit::Rest(BlockId::Head), Unit::Layer(1), Unit::Layer(0)].into_iter();
    assert_eq!(held(each_pass), rest.chain(pieces).collect::<Vec<_>>());
}

/// One that sends and receives nothing but what its neighbours wait for.
#[test]
fn a_stage_of_a_pipeline_has_a_micro_batch_go_forward_and_one_come_back() {
    let parts = parts(true);
    let part = &ModelPart { embedding: false, head: false, ..ModelPart::WHOLE };
    let shape = PassShape { part, ..shape(&parts, &[0..1, 1..2], 1) };
    let leg = |lane, number, completion| Leg { lane, number, segments: 0..2, completion };
    let exchange = |side, send, receive| Exchange::with(side, send, receive).unwrap();
    let slots = [
        Slot::Forward(leg(1, 4, None)),
        exchange(Side::Next, Some(1), Some(0)),
        Slot::Backward(leg(0, 3, Some(Completion::Keep))),
        exchange(Side::Previous, Some(0), None),
        Slot::Done { lane: 0 },
    ];
    let expected = "enter:1 | forward 0:1 | forward 1:1 | Next:1 Next:0 | number 3 | kept 1:0 | kept 0:0 | \
                    backward 1:0 | norm 1 | backward 0:0 | norm 0 | Previous:0 - | leave:0";
    assert_eq!(words(&Schedule::stage(&shape, &slots)).join(" | "), expected);
}

/// The first run of the first stage begins with tokens, the second one with what another stage sends; and each has its own layers.
#[test]
fn a_run_of_layers_is_a_part_of_a_stage() {
    let parts = parts(true);
    let part = &ModelPart { head: false, ..ModelPart::WHOLE };
    let shape = PassShape { part, ..shape(&parts, &[0..1, 1..2], 1) };
    let leg = |lane, segments| Leg { lane, number: 0, segments, completion: None };
    let exchange = Exchange { send: Some((Side::Next, 0)), receive: Some((Side::Previous, 0)) };
    let slots = [
        Slot::Forward(leg(0, 0..1)),
        Slot::Forward(leg(1, 1..2)),
        Slot::Backward(leg(1, 1..2)),
        Slot::Exchange(exchange),
    ];
    let next = Slot::Forward(leg(1, 1..2));
    let schedule = Schedule::stage_before(&shape, &slots, Some(&next));
    let expected = "embed:0 | forward 0:0 | enter:1 | forward 1:1 | number 0 | kept 1:1 | backward 1:1 | Next:0 Previous:0";
    assert_eq!(words(&schedule).join(" | "), expected);
    assert_eq!(schedule.weights().last(), Some(Unit::Layer(1)));
}
