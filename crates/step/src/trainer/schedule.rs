//! What a pass and an update do, in order, as a value. Everything else follows from that order: what is prefetched and
//! when, what stays in its buffer for the next action, and what is written back. No other order is kept.

mod overlap;

use std::ops::Range;

use plimsoll_model::{BlockId, ModelPart, ModelSpec};

use self::overlap::overlapped;
use super::Completion;
use super::parts::Parts;
use crate::optimizer::Update;
use crate::tier::Unit;

/// One thing that a step does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    /// The tokens of a micro-batch become the residual stream.
    Embed { micro_batch: usize },
    /// What an earlier stage has sent is a micro-batch's residual stream.
    Enter { micro_batch: usize },
    /// Which micro-batch of the step what follows adds to gradients.
    Number { number: u64 },
    /// Sends what a lane has to a neighbouring stage, and receives what such a stage has for another lane, or for the one that enters
    /// next; both at once.
    Exchange(Exchange),
    /// A micro-batch is through.
    Leave { micro_batch: usize },
    /// The tokens of some micro-batches that a piece of the embedding has.
    EmbedPiece { unit: Unit, lanes: Lanes, last: bool },
    /// A layer forward.
    Forward { layer: u32, segment: usize, micro_batch: usize },
    /// Final norm, head, loss and their gradients, of a head that is there as a whole.
    Loss { micro_batch: usize },
    /// Makes ready for a head that comes in pieces.
    LossBegin { micro_batch: usize },
    /// What a piece of the head adds to the losses of some micro-batches.
    LossPiece { unit: Unit, lanes: Lanes },
    /// The losses, when every piece was seen.
    LossTotal { lanes: Lanes },
    /// The gradients through a piece of the head, of some micro-batches.
    LossBackward { unit: Unit, lanes: Lanes, last: bool },
    /// The gradient of the last layer's output.
    LossEnd { micro_batch: usize },
    /// Begins to bring back what a segment keeps below the device.
    PrefetchKept { segment: usize, micro_batch: usize },
    /// A layer forward once more, for the input of the next one of its segment.
    Recompute { layer: u32, segment: usize, micro_batch: usize },
    /// A layer backward.
    Backward { layer: u32, segment: usize, micro_batch: usize },
    /// The gradients of the embedding's block that are on the device.
    EmbedBackward { micro_batch: usize },
    /// Adds a micro-batch's part of the gradient of a piece of the embedding.
    Scatter { unit: Unit, micro_batch: usize, last: bool },
    /// Makes the gradient of a piece of the embedding, of the rows that all micro-batches have looked up.
    GatherLookedUp { unit: Unit },
    /// Adds the terms that ranks which share products have of gradients.
    AddTerms { unit: Unit },
    /// Adds what a pass has written, on all ranks, to what the passes before add up to.
    Reduce { unit: Unit },
    /// Begins to exchange what a pass has written with the other ranks.
    BeginReduce { unit: Unit },
    /// The same as [`Reduce`](Action::Reduce), when the exchange that was begun is done.
    EndReduce { unit: Unit },
    /// Sums complete gradients over all ranks.
    Sum { unit: Unit },
    /// Takes the squared norms of complete gradients.
    Measure { unit: Unit },
    /// Updates one of the parts of a unit.
    Update { unit: Unit, part: usize, numbers: Update },
    /// Brings every rank the weights of a unit that others have updated.
    AllGather { unit: Unit },
    /// Begins to bring them.
    BeginAllGather { unit: Unit },
    /// Waits until those are there that were begun to be brought.
    EndAllGather,
    /// Adds the gradients of a table that the first and the last stage have.
    Tie { unit: Unit },
    /// The last stage's table takes the values of the first one's.
    Follow { unit: Unit, takes: bool },
    /// Gives back gradients that have served.
    Free { unit: Unit },
}

impl Action {
    /// The weights that it reads or changes, of those that may live below the device or on other ranks.
    fn weights(&self, parts: &Parts, ranks: BetweenRanks) -> Option<(Unit, Form)> {
        let form = if ranks.share_weights { Form::Own } else { Form::Whole };
        match *self {
            Action::Forward { layer, .. }
            | Action::Recompute { layer, .. }
            | Action::Backward { layer, .. } => Some((Unit::Layer(layer), Form::Whole)),
            Action::EmbedPiece { unit, .. }
            | Action::LossPiece { unit, .. }
            | Action::LossBackward { unit, .. } => Some((unit, Form::Whole)),
            Action::Update { unit, .. } => parts.changes_matrices(unit).then_some((unit, form)),
            Action::Follow { unit, .. } => Some((unit, form)),
            // What ranks share stays so.
            Action::AllGather { .. } | Action::BeginAllGather { .. } if ranks.share_weights => None,
            Action::AllGather { unit } | Action::BeginAllGather { unit } => {
                parts.changes_matrices(unit).then_some((unit, form))
            }
            _ => None,
        }
    }

    /// The gradients that it adds to, reads or gives back, of those that may live below the device. Where each pass has gradients
    /// of its own, it is what they add up to that does.
    fn held_gradients(&self, ranks: BetweenRanks) -> Option<(Unit, Form)> {
        let of_one_pass = matches!(
            self,
            Action::Backward { .. }
                | Action::LossBackward { .. }
                | Action::Scatter { .. }
                | Action::GatherLookedUp { .. }
                | Action::AddTerms { .. }
                | Action::BeginReduce { .. }
        );
        let held = self.gradients().filter(|_| !(ranks.reduce_each_pass && of_one_pass));
        held.map(|unit| (unit, Form::Whole))
    }

    /// The gradients that it adds to, reads or gives back.
    pub fn gradients(&self) -> Option<Unit> {
        match *self {
            Action::Backward { layer, .. } => Some(Unit::Layer(layer)),
            Action::LossBackward { unit, .. }
            | Action::Scatter { unit, .. }
            | Action::GatherLookedUp { unit }
            | Action::AddTerms { unit }
            | Action::Reduce { unit }
            | Action::BeginReduce { unit }
            | Action::EndReduce { unit }
            | Action::Sum { unit }
            | Action::Measure { unit }
            | Action::Update { unit, .. }
            | Action::Tie { unit }
            | Action::Free { unit } => Some(unit),
            _ => None,
        }
    }
}

/// The micro-batches that an action is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lanes {
    All,
    One(usize),
}

/// What a stage of a pipeline does with a micro-batch, and between two.
#[derive(Clone, Debug)]
pub(crate) enum Slot {
    /// Through a run of layers; behind the last layer of the model the loss too.
    Forward(Leg),
    /// Back through them.
    Backward(Leg),
    /// It is through.
    Done { lane: usize },
    /// As in [`Action::Exchange`].
    Exchange(Exchange),
}

/// A micro-batch's way through a run of layers.
#[derive(Clone, Debug)]
pub(crate) struct Leg {
    pub lane: usize,
    /// Which micro-batch of the step it is.
    pub number: u64,
    /// The segments that the run consists of.
    pub segments: Range<usize>,
    pub completion: Option<Completion>,
}

/// What a stage sends and receives at once: the side, and the lane that it is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Exchange {
    pub send: Option<(Side, usize)>,
    pub receive: Option<(Side, usize)>,
}

impl Exchange {
    /// With one neighbour; `None` where there is nothing to exchange.
    pub fn with(side: Side, send: Option<usize>, receive: Option<usize>) -> Option<Slot> {
        let of = |lane: Option<usize>| lane.map(|lane| (side, lane));
        Exchange { send: of(send), receive: of(receive) }.slot()
    }

    /// `None` where there is nothing to exchange.
    pub fn slot(self) -> Option<Slot> {
        (self != Exchange::default()).then_some(Slot::Exchange(self))
    }
}

/// A neighbour among the stages of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The stage before: gradients go there, and residual streams come from there.
    Previous,
    /// The stage behind.
    Next,
}

/// What of a unit an action needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// All of it.
    Whole,
    /// What is this rank's, of weights that ranks share.
    Own,
}

/// A unit that stays in its buffer for actions that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    pub unit: Unit,
    pub form: Form,
    /// Whether the action is the first of them: the unit is taken.
    pub first: bool,
    /// Whether it is the last one: the unit is released.
    pub last: bool,
    /// Whether any of them changes the unit (weights), or gives it back (gradients).
    pub ends: bool,
}

/// An action with what it needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub action: Action,
    pub weights: Option<Hold>,
    pub gradients: Option<Hold>,
}

/// Actions, in order.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    entries: Vec<Entry>,
    /// The weights that are needed first when it is done.
    ahead: Option<Unit>,
}

/// What a pass is made for.
pub(crate) struct PassShape<'s> {
    pub segments: &'s [Range<u32>],
    /// Micro-batches that go through each block together; or the chunks of a sequence.
    pub micro_batches: usize,
    /// Whether they are chunks of one sequence. These come back from the last one to the first, and one after the other where
    /// micro-batches are taken together.
    pub chunks: bool,
    /// Pieces in which the embedding's table comes; 0 where it does not.
    pub embedding_pieces: u32,
    pub loss: LossForm,
    pub embedding: EmbeddingGradient,
    pub parts: &'s Parts,
    pub ranks: BetweenRanks,
    /// Which blocks there are.
    pub part: &'s ModelPart,
    /// The block of the table that two stages have, where its gradients are added.
    pub tied: Option<BlockId>,
}

impl PassShape<'_> {
    /// Whether a run of layers begins with the embedding.
    fn begins(&self, segments: &Range<usize>) -> bool {
        self.part.embedding && segments.start == 0
    }

    /// Whether a run of layers ends with the head.
    fn ends(&self, segments: &Range<usize>) -> bool {
        self.part.head && segments.end == self.segments.len()
    }

    /// Whether a unit is of a table that two stages have.
    fn is_tied(&self, unit: Unit) -> bool {
        matches!(unit, Unit::Piece(block, _) if self.tied == Some(block))
    }

    /// Some of the segments, each with its place.
    fn of(&self, segments: Range<usize>) -> impl DoubleEndedIterator<Item = (usize, &Range<u32>)> {
        segments.clone().zip(self.segments.get(segments).unwrap_or_default())
    }

    /// The micro-batches that are taken together.
    fn lanes(&self) -> Vec<Lanes> {
        match self.chunks {
            true => (0..self.micro_batches).map(Lanes::One).collect(),
            false => vec![Lanes::All],
        }
    }

    /// The order in which they come back.
    fn back(&self) -> Vec<usize> {
        let mut back: Vec<usize> = (0..self.micro_batches).collect();
        if self.chunks {
            back.reverse();
        }
        back
    }
}

/// What ranks do together in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BetweenRanks {
    /// Whether there are several, which sum gradients when these are complete.
    pub sum_once: bool,
    /// Whether gradients are reduced in every pass.
    pub reduce_each_pass: bool,
    /// Whether each rank updates its own share of the weights.
    pub share_updates: bool,
    /// Whether each rank has its own share of the weights alone.
    pub share_weights: bool,
    /// Whether exchanges are under way while the step computes.
    pub overlap: bool,
}

/// How the loss has the head's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LossForm {
    /// As a whole.
    Whole,
    /// In so many pieces of a block's table.
    Pieces(BlockId, u32),
}

/// How the embedding's gradient comes about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EmbeddingGradient {
    /// Not at all.
    Frozen,
    /// On the device.
    Whole,
    /// In so many pieces, each made of what was looked up when it is needed.
    LookedUp(u32),
    /// In so many pieces, to each of which every micro-batch adds.
    Scattered(u32),
}

impl Schedule {
    /// A pass: micro-batches forward and backward, each block for all of them before the next block. `completion` is
    /// `None` where more micro-batches will add to the gradients.
    pub fn pass(shape: &PassShape<'_>, completion: Option<Completion>) -> Schedule {
        let mut actions = Vec::new();
        let lanes: Vec<usize> = (0..shape.micro_batches).collect();
        embed(&mut actions, shape, &lanes, &shape.lanes());
        forward(&mut actions, shape, 0..shape.segments.len(), &lanes);
        loss(&mut actions, shape, &shape.lanes(), completion);
        backward(&mut actions, shape, 0..shape.segments.len(), &shape.back(), completion);
        embedding(&mut actions, shape, &lanes, completion);
        Schedule::again(actions, shape)
    }

    /// What a stage of a pipeline does between two points at which it waits for nobody.
    pub fn stage(shape: &PassShape<'_>, slots: &[Slot]) -> Schedule {
        let mut actions = Vec::new();
        slots.iter().for_each(|slot| take(&mut actions, shape, slot));
        Schedule::again(actions, shape)
    }

    /// The same where another begins with `next` that does not begin as this one does.
    pub fn stage_before(shape: &PassShape<'_>, slots: &[Slot], next: Option<&Slot>) -> Schedule {
        let mut actions = [Vec::new(), Vec::new()];
        let [own, of_next] = &mut actions;
        slots.iter().for_each(|slot| take(own, shape, slot));
        next.into_iter().for_each(|slot| take(of_next, shape, slot));
        let [own, next] = actions.map(|actions| Schedule::new(actions, shape.parts, shape.ranks));
        let ahead = next.weights().next();
        Schedule { ahead, ..own }
    }

    /// What the first and the last stage do with the table that both have, when all of its gradients are complete.
    pub fn tie(parts: &Parts, ranks: BetweenRanks, block: BlockId) -> Schedule {
        let mut actions = Vec::new();
        for unit in (0..parts.pieces(block)).map(|piece| Unit::Piece(block, piece)) {
            actions.push(Action::Tie { unit });
            match parts.is_copy(unit) {
                true => actions.push(Action::Free { unit }),
                false => actions.push(Action::Measure { unit }),
            }
        }
        Schedule::new(actions, parts, ranks)
    }

    /// Brings the updated table from the first stage to the last one.
    pub fn follow(parts: &Parts, ranks: BetweenRanks, block: BlockId) -> Schedule {
        let units = (0..parts.pieces(block)).map(|piece| Unit::Piece(block, piece));
        let follow = |unit| Action::Follow { unit, takes: parts.is_copy(unit) };
        Schedule::new(units.map(follow).collect(), parts, ranks)
    }

    /// One behind which another follows that begins as it does.
    fn again(actions: Vec<Action>, shape: &PassShape<'_>) -> Schedule {
        let schedule = Schedule::new(overlapped(actions, shape.ranks), shape.parts, shape.ranks);
        // The next one begins as this one does.
        let ahead = schedule.weights().next();
        Schedule { ahead, ..schedule }
    }

    /// The layers forward, of one micro-batch, and nothing else.
    pub fn forward(layers: impl Iterator<Item = u32>) -> Schedule {
        let forward = |layer| Action::Forward { layer, segment: 0, micro_batch: 0 };
        let ranks = BetweenRanks::default();
        Schedule::new(layers.map(forward).collect(), &Parts::default(), ranks)
    }

    /// Updates of everything that is trained, from complete gradients. `looked_up`: those of the embedding's table are made
    /// of the rows that were looked up.
    pub fn updates(
        spec: &ModelSpec,
        parts: &Parts,
        ranks: BetweenRanks,
        looked_up: bool,
        numbers: Update,
    ) -> Schedule {
        let mut actions = Vec::new();
        let units = spec.blocks().flat_map(|block| parts.units_of(block));
        for unit in units.filter(|unit| !parts.is_copy(*unit)) {
            if looked_up && matches!(unit, Unit::Piece(BlockId::Embedding, _)) {
                actions.push(Action::GatherLookedUp { unit });
                if parts.is_partial(unit) {
                    actions.push(Action::AddTerms { unit });
                }
                if ranks.sum_once {
                    actions.push(Action::Sum { unit });
                }
            }
            update(&mut actions, parts, ranks, unit, numbers);
        }
        Schedule::new(overlapped(actions, ranks), parts, ranks)
    }

    fn new(actions: Vec<Action>, parts: &Parts, ranks: BetweenRanks) -> Schedule {
        let weights = holds(&actions, |action| action.weights(parts, ranks), is_change);
        let held = |action: &Action| action.held_gradients(ranks);
        let gradients = holds(&actions, held, |action| matches!(action, Action::Free { .. }));
        let entry = |((action, weights), gradients)| Entry { action, weights, gradients };
        let entries = actions.into_iter().zip(weights).zip(gradients).map(entry).collect();
        Schedule { entries, ahead: None }
    }

    /// The actions.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The weights that are taken, in order, and those that the next schedule begins with.
    pub fn weights(&self) -> impl Iterator<Item = Unit> {
        self.taken().map(|hold| hold.unit).chain(self.ahead)
    }

    /// The weights that are taken, in order.
    pub fn taken(&self) -> impl Iterator<Item = Hold> {
        self.entries.iter().filter_map(|entry| entry.weights).filter(|hold| hold.first)
    }

    /// The gradients that are taken, in order, and whether they are given back before they are released.
    pub fn gradients(&self) -> impl Iterator<Item = (Unit, bool)> {
        let taken = self.entries.iter().filter_map(|entry| entry.gradients).filter(|hold| hold.first);
        taken.map(|hold| (hold.unit, hold.ends))
    }

    /// The parts that are updated, in order: their units and places.
    pub fn updated(&self) -> impl Iterator<Item = (Unit, usize)> {
        self.entries.iter().filter_map(|entry| match entry.action {
            Action::Update { unit, part, .. } => Some((unit, part)),
            _ => None,
        })
    }
}

/// For each action, what it holds; actions that follow each other and need the same of a unit hold it together.
fn holds(
    actions: &[Action],
    needs: impl Fn(&Action) -> Option<(Unit, Form)>,
    ends: impl Fn(&Action) -> bool,
) -> Vec<Option<Hold>> {
    let mut all: Vec<Option<Hold>> = actions
        .iter()
        .map(|action| {
            let hold = |(unit, form)| Hold { unit, form, first: false, last: false, ends: ends(action) };
            needs(action).map(hold)
        })
        .collect();
    let mut held: Vec<&mut Hold> = all.iter_mut().flatten().collect();
    for together in held.chunk_by_mut(|a, b| (a.unit, a.form) == (b.unit, b.form)) {
        let ends = together.iter().any(|hold| hold.ends);
        together.iter_mut().for_each(|hold| hold.ends = ends);
        if let Some(hold) = together.first_mut() {
            hold.first = true;
        }
        if let Some(hold) = together.last_mut() {
            hold.last = true;
        }
    }
    all
}

/// What a stage does in a slot.
fn take(actions: &mut Vec<Action>, shape: &PassShape<'_>, slot: &Slot) {
    match slot {
        Slot::Forward(Leg { lane, number, segments, completion }) => {
            let (lanes, together) = ([*lane], [Lanes::One(*lane)]);
            match shape.begins(segments) {
                true => embed(actions, shape, &lanes, &together),
                false => actions.push(Action::Enter { micro_batch: *lane }),
            }
            forward(actions, shape, segments.clone(), &lanes);
            if shape.ends(segments) {
                actions.push(Action::Number { number: *number });
                loss(actions, shape, &together, *completion);
            }
        }
        Slot::Backward(Leg { lane, number, segments, completion }) => {
            actions.push(Action::Number { number: *number });
            let last = segments.end.saturating_sub(1);
            actions.push(Action::PrefetchKept { segment: last, micro_batch: *lane });
            backward(actions, shape, segments.clone(), &[*lane], *completion);
            if shape.begins(segments) {
                embedding(actions, shape, &[*lane], *completion);
            }
        }
        Slot::Exchange(exchange) => actions.push(Action::Exchange(*exchange)),
        Slot::Done { lane } => actions.push(Action::Leave { micro_batch: *lane }),
    }
}

/// The tokens of some micro-batches become residual streams.
fn embed(actions: &mut Vec<Action>, shape: &PassShape<'_>, lanes: &[usize], together: &[Lanes]) {
    match shape.embedding_pieces {
        0 => actions.extend(lanes.iter().map(|lane| Action::Embed { micro_batch: *lane })),
        pieces => actions.extend(together.iter().flat_map(|lanes| {
            (0..pieces).map(move |piece| Action::EmbedPiece {
                unit: Unit::Piece(BlockId::Embedding, piece),
                lanes: *lanes,
                last: piece + 1 == pieces,
            })
        })),
    }
}

/// Micro-batches through the layers of some segments.
fn forward(actions: &mut Vec<Action>, shape: &PassShape<'_>, segments: Range<usize>, lanes: &[usize]) {
    for (segment, layers) in shape.of(segments) {
        for micro_batch in lanes.iter().copied() {
            actions.extend(layers.clone().map(|layer| Action::Forward { layer, segment, micro_batch }));
        }
    }
}

/// The same back.
fn backward(
    actions: &mut Vec<Action>,
    shape: &PassShape<'_>,
    segments: Range<usize>,
    back: &[usize],
    completion: Option<Completion>,
) {
    let first = segments.start;
    for (segment, layers) in shape.of(segments).rev() {
        for (place, micro_batch) in back.iter().copied().enumerate() {
            let next = match back.get(place + 1) {
                Some(next) => Some((segment, *next)),
                None => segment.checked_sub(1).filter(|before| *before >= first).zip(back.first().copied()),
            };
            let prefetch = |(segment, micro_batch)| Action::PrefetchKept { segment, micro_batch };
            actions.extend(next.map(prefetch));
            let again = layers.start..layers.end.saturating_sub(1);
            actions.extend(again.map(|layer| Action::Recompute { layer, segment, micro_batch }));
            for layer in layers.clone().rev() {
                actions.push(Action::Backward { layer, segment, micro_batch });
                if place + 1 == back.len() {
                    complete(actions, shape, Unit::Layer(layer), completion);
                }
            }
        }
    }
}

fn loss(
    actions: &mut Vec<Action>,
    shape: &PassShape<'_>,
    together: &[Lanes],
    completion: Option<Completion>,
) {
    let own = |lanes| match lanes {
        Lanes::All => 0..shape.micro_batches,
        Lanes::One(one) => one..one + 1,
    };
    let LossForm::Pieces(block, pieces) = shape.loss else {
        let all = together.iter().flat_map(|lanes| own(*lanes));
        actions.extend(all.map(|micro_batch| Action::Loss { micro_batch }));
        let units = shape.parts.units_of(BlockId::Head);
        units.into_iter().for_each(|unit| complete(actions, shape, unit, completion));
        return;
    };
    let units = || (0..pieces).map(|piece| Unit::Piece(block, piece));
    for (place, lanes) in together.iter().copied().enumerate() {
        actions.extend(own(lanes).map(|micro_batch| Action::LossBegin { micro_batch }));
        actions.extend(units().map(|unit| Action::LossPiece { unit, lanes }));
        actions.push(Action::LossTotal { lanes });
        for (unit, piece) in units().zip(1..) {
            actions.push(Action::LossBackward { unit, lanes, last: piece == pieces });
            // A tied table has more to come.
            if block == BlockId::Head && place + 1 == together.len() {
                complete(actions, shape, unit, completion);
            }
        }
        actions.extend(own(lanes).map(|micro_batch| Action::LossEnd { micro_batch }));
    }
    complete(actions, shape, Unit::Rest(BlockId::Head), completion);
}

fn embedding(
    actions: &mut Vec<Action>,
    shape: &PassShape<'_>,
    lanes: &[usize],
    completion: Option<Completion>,
) {
    if shape.embedding == EmbeddingGradient::Frozen {
        return;
    }
    let units = |pieces| (0..pieces).map(|piece| Unit::Piece(BlockId::Embedding, piece));
    for (place, micro_batch) in lanes.iter().copied().enumerate() {
        let is_last = place + 1 == lanes.len();
        let completion = completion.filter(|_| is_last);
        actions.push(Action::EmbedBackward { micro_batch });
        match shape.embedding {
            EmbeddingGradient::Frozen | EmbeddingGradient::Whole => {}
            EmbeddingGradient::LookedUp(pieces) => {
                let Some(completion) = completion else { continue };
                for unit in units(pieces) {
                    actions.push(Action::GatherLookedUp { unit });
                    complete(actions, shape, unit, Some(completion));
                    // It can be made again.
                    if matches!(completion, Completion::Keep) {
                        actions.push(Action::Free { unit });
                    }
                }
            }
            EmbeddingGradient::Scattered(pieces) => {
                for (unit, piece) in units(pieces).zip(1..) {
                    actions.push(Action::Scatter { unit, micro_batch, last: piece == pieces });
                    if is_last {
                        complete(actions, shape, unit, completion);
                    }
                }
            }
        }
    }
    if shape.embedding == EmbeddingGradient::Whole {
        let units = units(shape.parts.pieces(BlockId::Embedding));
        units.for_each(|unit| complete(actions, shape, unit, completion));
    }
    complete(actions, shape, Unit::Rest(BlockId::Embedding), completion);
}

/// What becomes of a unit's gradients when a pass has written them, and when they are complete.
fn complete(actions: &mut Vec<Action>, shape: &PassShape<'_>, unit: Unit, completion: Option<Completion>) {
    if shape.parts.of(unit).is_empty() {
        return;
    }
    if shape.parts.is_partial(unit) && (shape.ranks.reduce_each_pass || completion.is_some()) {
        actions.push(Action::AddTerms { unit });
    }
    if shape.ranks.reduce_each_pass {
        actions.push(Action::Reduce { unit });
    }
    let Some(completion) = completion else { return };
    if shape.ranks.sum_once {
        actions.push(Action::Sum { unit });
    }
    // A table that two stages have has more to come.
    if shape.is_tied(unit) {
        return;
    }
    actions.push(Action::Measure { unit });
    match completion {
        Completion::Keep => {}
        Completion::Measure => actions.push(Action::Free { unit }),
        Completion::Update(numbers) => {
            update(actions, shape.parts, shape.ranks, unit, numbers);
        }
    }
}

/// Whether an action changes the weights that it holds.
fn is_change(action: &Action) -> bool {
    matches!(
        action,
        Action::Update { .. }
            | Action::AllGather { .. }
            | Action::BeginAllGather { .. }
            | Action::Follow { takes: true, .. }
    )
}

fn update(actions: &mut Vec<Action>, parts: &Parts, ranks: BetweenRanks, unit: Unit, numbers: Update) {
    let of_unit = 0..parts.of(unit).len();
    actions.extend(of_unit.map(|part| Action::Update { unit, part, numbers }));
    if ranks.share_updates {
        actions.push(Action::AllGather { unit });
    }
    actions.push(Action::Free { unit });
}

#[cfg(test)]
mod tests;
