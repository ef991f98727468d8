//! To experts and back: choices and weights of tokens, rows sorted by expert, and the load-balancing loss.

use std::cmp::Ordering;

use super::column_sums::add_assign;
use super::elementwise::Input;
use super::math::{dot, exp, sigmoid};
use super::split::{Shared, SharedFloats, for_each_part};
use super::storage::{Tile, tiles};
use super::{Exec, Floats, FloatsMut, rows_per_task};
use crate::op::{MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN, NOWHERE};
use crate::{Capacity, LoadRatio, Router, RouterGroups};

/// The scores of one token.
struct Scores([f32; MAX_EXPERTS as usize]);

/// Added to a sum of sigmoids, which may all be nothing.
const LEAST_SUM: f32 = 1e-20;

impl Scores {
    fn new() -> Scores {
        Scores([0.0; MAX_EXPERTS as usize])
    }

    /// What a router makes of a token's logits.
    fn of(&mut self, logits: &[f32], is_sigmoid: bool) -> &mut [f32] {
        let scores = &mut self.0[..logits.len()];
        if is_sigmoid {
            scores.iter_mut().zip(logits).for_each(|(score, logit)| *score = sigmoid::<false>(*logit));
            return scores;
        }
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for (score, logit) in scores.iter_mut().zip(logits) {
            *score = exp::<false>(logit - most);
            sum += *score;
        }
        scores.iter_mut().for_each(|score| *score /= sum);
        scores
    }
}

/// The experts of every token; logits [N, E], choice [N, k].
pub(in crate::cpu) fn choose(
    exec: Exec<'_>,
    logits: &[f32],
    correction: Option<Floats<'_>>,
    router: Router,
    choice: &mut [u32],
    experts: usize,
) {
    let tokens = logits.len() / experts.max(1);
    let each = choice.len() / tokens.max(1);
    let rows = rows_per_task(experts);
    let mut added = Scores::new();
    if let Some(correction) = correction {
        correction.copy_to(exec.simd, 0..experts, &mut added.0[..experts]);
    }
    let added = correction.map(|_| &added.0[..experts]);
    for_each_part(exec, tokens.div_ceil(rows), Shared::new(choice, rows * each), |task, choice, _| {
        let mut scores = Scores::new();
        for (token, choice) in (task * rows..).zip(choice.chunks_mut(each)) {
            let logits = &logits[token * experts..(token + 1) * experts];
            // The order of a softmax is that of its logits.
            if added.is_none() && router.groups.is_none() {
                best(logits, choice);
                continue;
            }
            let scores = scores.of(logits, router.sigmoid);
            if let Some(added) = added {
                scores.iter_mut().zip(added).for_each(|(score, more)| *score += more);
            }
            if let Some(groups) = router.groups {
                keep_groups(scores, groups);
            }
            best(scores, choice);
        }
    });
}

/// The places of the highest scores, the highest first, and of equal ones the first. What is no number comes last.
fn best(scores: &[f32], chosen: &mut [u32]) {
    let mut count = 0;
    let score = |place: u32| scores[place as usize];
    for place in 0..scores.len() as u32 {
        let is_better =
            |than: u32| score(place) > score(than) || score(than).is_nan() && !score(place).is_nan();
        if count == chosen.len() && !is_better(chosen[count - 1]) {
            continue;
        }
        let mut at = count.min(chosen.len() - 1);
        while at > 0 && is_better(chosen[at - 1]) {
            chosen[at] = chosen[at - 1];
            at -= 1;
        }
        chosen[at] = place;
        count = chosen.len().min(count + 1);
    }
}

/// Leaves no score to experts outside the best groups.
fn keep_groups(scores: &mut [f32], RouterGroups { count, chosen, by_two }: RouterGroups) {
    let (groups, chosen, counted) = (count as usize, chosen as usize, if by_two { 2 } else { 1 });
    let size = scores.len() / groups;
    let of_group = |group: &[f32]| {
        let mut two = [0u32; 2];
        let two = &mut two[..size.min(counted)];
        best(group, two);
        two.iter().map(|place| group[*place as usize]).sum::<f32>()
    };
    let mut sums = Scores::new();
    for (sum, group) in sums.0.iter_mut().zip(scores.chunks(size)) {
        *sum = of_group(group);
    }
    let mut kept = [0u32; MAX_EXPERTS as usize];
    let kept = &mut kept[..chosen];
    best(&sums.0[..groups], kept);
    for (group, scores) in (0..).zip(scores.chunks_mut(size)) {
        if !kept.contains(&group) {
            scores.fill(f32::NEG_INFINITY);
        }
    }
}

/// The experts of a token, as its places have them.
fn chosen<'c>(
    choice: Option<&'c [u32]>,
    token: usize,
    each: usize,
) -> impl Iterator<Item = usize> + Clone + use<'c> {
    let own = choice.map(|choice| &choice[token * each..(token + 1) * each]);
    (0..each).map(move |j| own.map_or(j, |own| own[j] as usize))
}

/// The sum of the scores of a token's experts, where weights are divided by it.
fn sum_of(scores: &[f32], chosen: impl Iterator<Item = usize>, router: Router) -> f32 {
    if !router.normalise {
        return 1.0;
    }
    let sum: f32 = chosen.map(|expert| scores[expert]).sum();
    if router.sigmoid { sum + LEAST_SUM } else { sum }
}

/// Rows sorted by expert, a block of slots for every `each` experts; false where a block has too few, or there are no such rows.
pub(in crate::cpu) fn to_blocks(
    sources: &[u32],
    offsets: &[u32],
    each: usize,
    slots: &mut [u32],
    taken: &mut [u32],
) -> bool {
    let size = slots.len() / ((offsets.len().saturating_sub(1)) / each.max(1)).max(1);
    slots.fill(NOWHERE);
    taken.fill(NOWHERE);
    let borders = offsets.iter().step_by(each.max(1)).map(|row| *row as usize);
    for (block, (first, end)) in borders.clone().zip(borders.skip(1)).enumerate() {
        let begin = block * size;
        let Some(rows) = sources.get(first..end).filter(|rows| rows.len() <= size) else { return false };
        for (slot, place) in (begin..).zip(rows) {
            let (Some(own), Some(taken)) = (slots.get_mut(slot), taken.get_mut(*place as usize)) else {
                return false;
            };
            (*own, *taken) = (*place, slot as u32);
        }
    }
    true
}

/// Rows sorted by expert, a block of slots for every `each` places that they come from; false as above.
pub(in crate::cpu) fn from_blocks(
    sources: &[u32],
    offsets: &[u32],
    each: usize,
    blocks: usize,
    rows: &mut [u32],
    slots: &mut [u32],
) -> bool {
    let size = rows.len() / blocks.max(1);
    rows.fill(NOWHERE);
    slots.fill(NOWHERE);
    let last = offsets.last().map_or(0, |last| *last as usize);
    let Some(sorted) = sources.get(..last) else { return false };
    let mut filled = vec![0; blocks];
    for (row, (place, slot)) in sorted.iter().zip(slots).enumerate() {
        let block = *place as usize / each.max(1);
        let Some(filled) = filled.get_mut(block).filter(|filled| **filled < size) else { return false };
        let own = block * size + *filled;
        *filled += 1;
        let Some(of_slot) = rows.get_mut(own) else { return false };
        (*of_slot, *slot) = (row as u32, own as u32);
    }
    true
}

/// weights [N, k] of the choice.
pub(in crate::cpu) fn weigh(
    exec: Exec<'_>,
    logits: &[f32],
    choice: Option<&[u32]>,
    router: Router,
    weights: &mut [f32],
    experts: usize,
) {
    let tokens = logits.len() / experts.max(1);
    let each = weights.len() / tokens.max(1);
    let rows = rows_per_task(experts);
    for_each_part(exec, tokens.div_ceil(rows), Shared::new(weights, rows * each), |task, weights, _| {
        let mut scores = Scores::new();
        for (token, weights) in (task * rows..).zip(weights.chunks_mut(each)) {
            let scores = scores.of(&logits[token * experts..(token + 1) * experts], router.sigmoid);
            let chosen = chosen(choice, token, each);
            let factor = router.scale / sum_of(scores, chosen.clone(), router);
            weights.iter_mut().zip(chosen).for_each(|(weight, expert)| *weight = scores[expert] * factor);
        }
    });
}

/// dlogits [N, E] from dweights [N, k].
pub(in crate::cpu) fn weigh_backward(
    exec: Exec<'_>,
    logits: &[f32],
    choice: Option<&[u32]>,
    router: Router,
    dweights: &[f32],
    dlogits: &mut [f32],
    experts: usize,
) {
    let tokens = logits.len() / experts.max(1);
    let each = dweights.len() / tokens.max(1);
    let rows = rows_per_task(experts);
    for_each_part(exec, tokens.div_ceil(rows), Shared::new(dlogits, rows * experts), |task, dlogits, _| {
        let mut scores = Scores::new();
        for (token, dlogits) in (task * rows..).zip(dlogits.chunks_mut(experts)) {
            let scores = scores.of(&logits[token * experts..(token + 1) * experts], router.sigmoid);
            let dweights = &dweights[token * each..(token + 1) * each];
            let chosen = chosen(choice, token, each);
            let sum = sum_of(scores, chosen.clone(), router);
            let factor = router.scale / sum;
            // Through the sum, each score has a part in all weights.
            let through_sum = if router.normalise {
                let pairs = dweights.iter().zip(chosen.clone());
                pairs.map(|(dweight, expert)| dweight * scores[expert]).sum::<f32>() * factor / sum
            } else {
                0.0
            };
            dlogits.fill(0.0);
            for (dweight, expert) in dweights.iter().zip(chosen.clone()) {
                dlogits[expert] = dweight * factor - through_sum;
            }
            if router.sigmoid {
                dlogits.iter_mut().zip(&*scores).for_each(|(d, score)| *d *= score * (1.0 - score));
            } else {
                let mean: f32 = chosen.map(|expert| dlogits[expert] * scores[expert]).sum();
                dlogits.iter_mut().zip(&*scores).for_each(|(d, score)| *d = score * (*d - mean));
            }
        }
    });
}

/// Places by expert, from the first one that has an offset on; those of experts that have none come last, as far as there are rows. Says
/// whether there are rows for all others.
pub(in crate::cpu) fn sort(
    choice: &[u32],
    first: u32,
    sources: &mut [u32],
    places: &mut [u32],
    offsets: &mut [u32],
) -> bool {
    let experts = offsets.len() - 1;
    let mut next = [0u32; MAX_EXPERTS as usize + 1];
    let next = &mut next[..=experts];
    // Experts before the first wrap around to numbers beyond all others.
    let number =
        |expert: u32| (expert != NOWHERE).then(|| (expert.wrapping_sub(first) as usize).min(experts));
    choice.iter().filter_map(|expert| number(*expert)).for_each(|number| next[number] += 1);
    let mut sum = 0;
    for (offset, next) in offsets.iter_mut().zip(next.iter_mut()) {
        *offset = sum;
        sum += *next;
        *next = *offset;
    }
    if offsets[experts] as usize > sources.len() {
        return false;
    }
    for (place, expert) in choice.iter().enumerate() {
        let next = number(*expert).map(|number| &mut next[number]);
        places[place] = match next {
            Some(next) if (*next as usize) < sources.len() => {
                sources[*next as usize] = place as u32;
                *next += 1;
                *next - 1
            }
            _ => NOWHERE,
        };
    }
    sources[next[experts] as usize..].fill(NOWHERE);
    true
}

/// The choice without what is beyond an expert's capacity; how many places that leaves out.
pub(in crate::cpu) fn limit(choice: &[u32], capacity: Capacity, taken: &mut [u32]) -> u32 {
    let mut counts = [0u32; MAX_EXPERTS as usize];
    let mut dropped = 0;
    for (expert, taken) in choice.iter().zip(taken) {
        let most = if u64::from(*expert) < capacity.first { capacity.each } else { capacity.others };
        let count = &mut counts[*expert as usize];
        *taken = *expert;
        if u64::from(*count) < most {
            *count += 1;
        } else {
            *taken = NOWHERE;
            dropped += 1;
        }
    }
    dropped
}

/// correction[e] += speed * sign(mean of counts - counts[e])
pub(in crate::cpu) fn adjust_correction(counts: &[u32], speed: f32, correction: &mut [f32]) {
    let total: u128 = counts.iter().map(|count| u128::from(*count)).sum();
    for (count, correction) in counts.iter().zip(correction) {
        // Compared as whole numbers: a mean has no rounding.
        match (u128::from(*count) * counts.len() as u128).cmp(&total) {
            Ordering::Less => *correction += speed,
            Ordering::Greater => *correction -= speed,
            Ordering::Equal => {}
        }
    }
}

/// out[r] = x[sources[r] / each], rows of so many bytes.
pub(in crate::cpu) fn gather(
    exec: Exec<'_>,
    x: &[u8],
    sources: &[u32],
    each: usize,
    out: &mut [u8],
    row_bytes: usize,
) {
    let rows = rows_per_task(row_bytes / size_of::<u32>());
    let row_bytes = row_bytes.max(1);
    let tasks = sources.len().div_ceil(rows);
    for_each_part(exec, tasks, Shared::new(out, rows * row_bytes), |task, out, _| {
        for (source, out) in sources[task * rows..].iter().zip(out.chunks_mut(row_bytes)) {
            if *source == NOWHERE {
                out.fill(0);
                continue;
            }
            let token = *source as usize / each;
            out.copy_from_slice(&x[token * row_bytes..(token + 1) * row_bytes]);
        }
    });
}

/// out[n] (+)= the sum of a token's rows, in the order of its places.
pub(in crate::cpu) fn combine(
    exec: Exec<'_>,
    x: Floats<'_>,
    places: &[u32],
    each: usize,
    out: FloatsMut<'_>,
    columns: usize,
    accumulate: bool,
) {
    let task_rows = rows_per_task(columns);
    let tasks = (places.len() / each).div_ceil(task_rows);
    for_each_part(exec, tasks, SharedFloats::new(out, task_rows * columns), |task, mut out, _| {
        let [mut x_tile, mut out_tile] = Tile::array();
        for index in 0..out.len() / columns.max(1) {
            let token = task * task_rows + index;
            let places = &places[token * each..(token + 1) * each];
            let mut out = out.row(index, columns);
            for range in tiles(columns) {
                let sum = if accumulate {
                    out.current(exec.simd, range.clone(), &mut out_tile)
                } else {
                    let sum = out.target(range.clone(), &mut out_tile);
                    sum.fill(0.0);
                    sum
                };
                for place in places.iter().filter(|place| **place != NOWHERE) {
                    let x = x.row(*place as usize, columns);
                    add_assign(exec.simd, x.load(exec.simd, range.clone(), &mut x_tile), sum);
                }
                out.store(exec.simd, range, &out_tile);
            }
        }
    });
}

/// out[r] = x[r] * factors[sources[r]]
pub(in crate::cpu) fn scale_rows(
    exec: Exec<'_>,
    x: Input<'_>,
    factors: &[f32],
    sources: Option<&[u32]>,
    out: FloatsMut<'_>,
    columns: usize,
) {
    let task_rows = rows_per_task(columns);
    let tasks = out.len().div_ceil(task_rows * columns.max(1));
    for_each_part(exec, tasks, SharedFloats::new(out, task_rows * columns), |task, mut out, _| {
        let [mut x_tile, mut out_tile] = Tile::array();
        for index in 0..out.len() / columns.max(1) {
            let row = task * task_rows + index;
            let source = sources.map_or(row as u32, |sources| sources[row]);
            let factor = if source == NOWHERE { None } else { Some(factors[source as usize]) };
            let mut out = out.row(index, columns);
            for range in tiles(columns) {
                let n = range.len();
                let Some(factor) = factor else {
                    out.target(range.clone(), &mut out_tile).fill(0.0);
                    out.store(exec.simd, range, &out_tile);
                    continue;
                };
                let x = match x {
                    Input::Apart(x) => x.row(row, columns).load(exec.simd, range.clone(), &mut x_tile),
                    Input::InPlace(_) => {
                        out.as_floats().copy_to(exec.simd, range.clone(), &mut x_tile.0[..n]);
                        &x_tile.0[..n]
                    }
                };
                let values = out.target(range.clone(), &mut out_tile);
                values.iter_mut().zip(x).for_each(|(out, x)| *out = x * factor);
                out.store(exec.simd, range, &out_tile);
            }
        }
    });
}

/// out[p] = the dot product of rows places[p]
pub(in crate::cpu) fn row_dots(
    exec: Exec<'_>,
    a: Floats<'_>,
    b: Floats<'_>,
    places: Option<&[u32]>,
    out: &mut [f32],
    columns: usize,
) {
    let (tasks, task_rows) = (out.len().div_ceil(rows_per_task(columns)), rows_per_task(columns));
    for_each_part(exec, tasks, Shared::new(out, task_rows), |task, out, _| {
        let [mut a_tile, mut b_tile] = Tile::array();
        for (place, out) in (task * task_rows..).zip(out) {
            let row = places.map_or(place, |places| places[place] as usize);
            *out = 0.0;
            if row == NOWHERE as usize {
                continue;
            }
            let (a, b) = (a.row(row, columns), b.row(row, columns));
            // Tiles, whatever the types: sums are cut alike.
            for range in tiles(columns) {
                let a = a.load(exec.simd, range.clone(), &mut a_tile);
                *out += dot(a, b.load(exec.simd, range, &mut b_tile));
            }
        }
    });
}

/// counts[e] += how often e was chosen
pub(in crate::cpu) fn count(choice: &[u32], counts: &mut [u32]) {
    choice.iter().for_each(|expert| counts[*expert as usize] = counts[*expert as usize].saturating_add(1));
}

/// The logarithm of the sum of a token's exponentials; its softmax is left in the scores.
fn log_sum_exp(scores: &mut Scores, logits: &[f32]) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let best = logits.iter().position(|logit| *logit == most).unwrap_or(0);
    // The largest score is one over the sum.
    f64::from(most) - f64::from(scores.of(logits, false)[best]).ln()
}

/// factor * the sum of squared logarithms of every token, in the order of tokens.
pub(in crate::cpu) fn z_loss(logits: &[f32], experts: usize, factor: f64) -> f32 {
    let mut scores = Scores::new();
    let squares = logits.chunks_exact(experts.max(1)).map(|logits| log_sum_exp(&mut scores, logits).powi(2));
    (factor * squares.sum::<f64>()) as f32
}

/// dlogits += the gradient of that.
pub(in crate::cpu) fn z_backward(
    exec: Exec<'_>,
    logits: &[f32],
    factor: f64,
    dlogits: &mut [f32],
    experts: usize,
) {
    let (tokens, rows) = (logits.len() / experts.max(1), rows_per_task(experts));
    for_each_part(exec, tokens.div_ceil(rows), Shared::new(dlogits, rows * experts), |task, dlogits, _| {
        let mut scores = Scores::new();
        for (token, dlogits) in (task * rows..).zip(dlogits.chunks_mut(experts)) {
            let logits = &logits[token * experts..(token + 1) * experts];
            let each = (2.0 * factor * log_sum_exp(&mut scores, logits)) as f32;
            dlogits.iter_mut().zip(&scores.0).for_each(|(d, score)| *d += each * score);
        }
    });
}

/// mass += the softmax of every token, in the order of tokens.
pub(in crate::cpu) fn add_mass(logits: &[f32], mass: &mut [f64]) {
    let mut scores = Scores::new();
    for logits in logits.chunks_exact(mass.len()) {
        let scores = scores.of(logits, false);
        mass.iter_mut().zip(scores).for_each(|(mass, score)| *mass += f64::from(*score));
    }
}

/// factor * E * sum over e of ratio[e] * counts[e] / rows * mass[e] / rows
pub(in crate::cpu) fn balance_loss(
    counts: &[u32],
    mass: &[f64],
    rows: u64,
    ratio: LoadRatio,
    factor: f64,
) -> f32 {
    let rows = rows.max(1) as f64;
    let pairs = counts.iter().zip(mass).enumerate();
    let products = pairs.map(|(e, (count, mass))| ratio.of(e) * f64::from(*count) / rows * (mass / rows));
    (factor * counts.len() as f64 * products.sum::<f64>()) as f32
}

/// dlogits += the gradient of that.
pub(in crate::cpu) fn balance_backward(
    exec: Exec<'_>,
    logits: &[f32],
    counts: &[u32],
    rows: u64,
    ratio: LoadRatio,
    factor: f64,
    dlogits: &mut [f32],
) {
    let experts = counts.len();
    let all = rows.max(1) as f64;
    let each = (factor * experts as f64 / all) as f32;
    let mut shares = Scores::new();
    for (expert, (share, count)) in shares.0.iter_mut().zip(counts).enumerate() {
        *share = (ratio.of(expert) * f64::from(*count) / all) as f32;
    }
    let shares = &shares.0[..experts];
    let (tokens, rows) = (logits.len() / experts.max(1), rows_per_task(experts));
    for_each_part(exec, tokens.div_ceil(rows), Shared::new(dlogits, rows * experts), |task, dlogits, _| {
        let mut scores = Scores::new();
        for (token, dlogits) in (task * rows..).zip(dlogits.chunks_mut(experts)) {
            let scores = scores.of(&logits[token * experts..(token + 1) * experts], false);
            let mean: f32 = scores.iter().zip(shares).map(|(score, share)| score * share).sum();
            for ((d, score), share) in dlogits.iter_mut().zip(scores).zip(shares) {
                *d += each * *score * (share - mean);
            }
        }
    });
}

const _: () = assert!(MAX_EXPERTS_PER_TOKEN <= MAX_EXPERTS);
