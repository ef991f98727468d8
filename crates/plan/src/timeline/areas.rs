//! Which allocations are rectangles of their own in a picture, and which are too small to be seen apart: those become areas
//! by tag. However many allocations there are, there is a most of what is drawn.

use std::collections::{BTreeMap, HashMap};

use plimsoll_memory::Tag;

/// Rectangles of their own at most.
const MOST_RECTANGLES: usize = 1500;

/// Parts of areas at most.
const MOST_AREAS: usize = 6000;

/// By how much what counts as small grows until no more than the most is drawn.
const COARSER: f64 = 1.5;

/// A rectangle in pixels, from the upper left corner of a panel on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rectangle {
    pub left: f64,
    pub top: f64,
    pub width: f64,
    pub height: f64,
}

/// What is drawn of the rectangles of allocations.
#[derive(Debug, PartialEq)]
pub(super) struct Drawn {
    /// Indices of those with a rectangle of their own.
    pub apart: Vec<usize>,
    /// What the others cover, by tag.
    pub areas: BTreeMap<Tag, Vec<Rectangle>>,
    /// How many allocations these are, by tag.
    pub merged: BTreeMap<Tag, usize>,
}

/// Decides what is drawn of the allocations in a panel of `size` pixels.
pub(super) fn drawn(all: &[(Tag, Rectangle)], size: [f64; 2]) -> Drawn {
    let mut least = 1.0;
    let is_small = |rectangle: &Rectangle, least: f64| rectangle.width < least || rectangle.height < least;
    while all.iter().filter(|(_, rectangle)| !is_small(rectangle, least)).count() > MOST_RECTANGLES {
        least *= COARSER;
    }
    let (small, apart): (Vec<usize>, Vec<usize>) =
        (0..all.len()).partition(|index| all.get(*index).is_some_and(|(_, own)| is_small(own, least)));
    let small: Vec<(Tag, Rectangle)> = small.iter().filter_map(|index| all.get(*index).copied()).collect();
    let mut merged = BTreeMap::new();
    small.iter().for_each(|(tag, _)| *merged.entry(*tag).or_default() += 1);
    let mut cell = 1.0;
    let areas = loop {
        let areas = Grid::painted(&small, size, cell).areas();
        if areas.values().map(Vec::len).sum::<usize>() <= MOST_AREAS {
            break areas;
        }
        cell *= COARSER;
    };
    Drawn { apart, areas, merged }
}

/// Square cells, each with the tag that was painted last.
struct Grid {
    cell: f64,
    rows: usize,
    /// Column by column.
    cells: Vec<Option<Tag>>,
}

impl Grid {
    fn painted(all: &[(Tag, Rectangle)], [width, height]: [f64; 2], cell: f64) -> Grid {
        let count = |length: f64| ((length / cell).ceil() as usize).max(1);
        let (columns, rows) = (count(width), count(height));
        let mut cells = vec![None; columns * rows];
        let span = |from: f64, length: f64, most: usize| {
            let first = ((from / cell) as usize).min(most - 1);
            let end = (((from + length) / cell).ceil() as usize).clamp(first + 1, most);
            first..end
        };
        for (tag, own) in all {
            let down = span(own.top, own.height, rows);
            for column in span(own.left, own.width, columns) {
                if let Some(column) = cells.get_mut(column * rows..(column + 1) * rows)
                    && let Some(run) = column.get_mut(down.clone())
                {
                    run.fill(Some(*tag));
                }
            }
        }
        Grid { cell, rows, cells }
    }

    /// The painted cells as rectangles: runs down a column, each as wide as it is the same in the columns that follow.
    fn areas(&self) -> BTreeMap<Tag, Vec<Rectangle>> {
        let mut areas: BTreeMap<Tag, Vec<Rectangle>> = BTreeMap::new();
        let mut open: HashMap<Run, usize> = HashMap::new();
        let columns = self.cells.chunks(self.rows).map(runs).chain([Vec::new()]);
        for (column, runs) in columns.enumerate() {
            let mut now: HashMap<Run, usize> = HashMap::with_capacity(runs.len());
            for run in runs {
                let since = open.remove(&run).unwrap_or(column);
                now.insert(run, since);
            }
            let mut ended: Vec<(Run, usize)> = std::mem::replace(&mut open, now).into_iter().collect();
            ended.sort_unstable();
            for (Run { first, end, tag }, since) in ended {
                let pixels = |cells: usize| cells as f64 * self.cell;
                areas.entry(tag).or_default().push(Rectangle {
                    left: pixels(since),
                    top: pixels(first),
                    width: pixels(column - since),
                    height: pixels(end - first),
                });
            }
        }
        areas
    }
}

/// Cells of one tag below each other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Run {
    first: usize,
    end: usize,
    tag: Tag,
}

fn runs(column: &[Option<Tag>]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (row, tag) in column.iter().enumerate() {
        let Some(tag) = *tag else { continue };
        match runs.last_mut().filter(|run| run.tag == tag && run.end == row) {
            Some(run) => run.end = row + 1,
            None => runs.push(Run { first: row, end: row + 1, tag }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rectangle(left: f64, top: f64, width: f64, height: f64) -> Rectangle {
        Rectangle { left, top, width, height }
    }

    #[test]
    fn what_is_too_small_becomes_an_area() {
        let all = [
            (Tag::Weights, rectangle(0.0, 0.0, 10.0, 10.0)),
            (Tag::Activations, rectangle(2.1, 12.0, 0.2, 4.0)),
            (Tag::Activations, rectangle(3.1, 12.0, 0.1, 4.0)),
            (Tag::Logits, rectangle(3.5, 16.0, 8.0, 0.1)),
        ];
        let drawn = drawn(&all, [20.0, 20.0]);
        assert_eq!(drawn.apart, [0]);
        assert_eq!(drawn.merged, [(Tag::Activations, 2), (Tag::Logits, 1)].into());
        let areas = [
            (Tag::Activations, vec![rectangle(2.0, 12.0, 2.0, 4.0)]),
            (Tag::Logits, vec![rectangle(3.0, 16.0, 9.0, 1.0)]),
        ];
        assert_eq!(drawn.areas, areas.into());
    }

    /// What is as large as the least that is seen is drawn; as many as the most are.
    #[test]
    fn the_edge_of_what_is_drawn() {
        let apart = |count: usize, width: f64, height: f64| {
            let all = vec![(Tag::Weights, rectangle(0.0, 0.0, width, height)); count];
            super::drawn(&all, [20.0, 20.0]).apart.len()
        };
        assert_eq!(
            [apart(1, 1.0, 4.0), apart(1, 4.0, 1.0), apart(1, 0.9, 4.0), apart(1, 4.0, 0.9)],
            [1, 1, 0, 0]
        );
        assert_eq!(apart(MOST_RECTANGLES, 1.0, 1.0), MOST_RECTANGLES);
        assert_eq!(apart(MOST_RECTANGLES + 1, 1.0, 1.0), 0);
        assert_eq!(apart(MOST_RECTANGLES + 1, 1.6, 1.6), 0);
        // Sizes go up by halves: of these, the larger are left.
        let mixed: Vec<(Tag, Rectangle)> = (0..2 * MOST_RECTANGLES)
            .map(|i| if i % 2 == 0 { 1.6 } else { 2.0 })
            .map(|size| (Tag::Weights, rectangle(0.0, 0.0, size, size)))
            .collect();
        assert_eq!(super::drawn(&mixed, [20.0, 20.0]).apart.len(), 0);
        let mixed: Vec<(Tag, Rectangle)> = (0..2 * MOST_RECTANGLES)
            .map(|i| if i % 2 == 0 { 1.4 } else { 1.6 })
            .map(|size| (Tag::Weights, rectangle(0.0, 0.0, size, size)))
            .collect();
        assert_eq!(super::drawn(&mixed, [20.0, 20.0]).apart.len(), MOST_RECTANGLES);
    }

    #[test]
    fn there_is_a_most_of_what_is_drawn() {
        let tags = [Tag::Weights, Tag::Logits, Tag::Activations];
        let place =
            |i: usize, size: f64| rectangle((i * 7919 % 1000) as f64, (i * 104_729 % 500) as f64, size, size);
        let all: Vec<(Tag, Rectangle)> =
            (0..50_000).map(|i| (tags[i % 3], place(i, if i % 2 == 0 { 0.5 } else { 1.5 }))).collect();
        let drawn = drawn(&all, [1000.0, 500.0]);
        assert!(drawn.apart.len() <= MOST_RECTANGLES);
        assert!(drawn.areas.values().map(Vec::len).sum::<usize>() <= MOST_AREAS);
        assert_eq!(drawn.apart.len() + drawn.merged.values().sum::<usize>(), all.len());
        // Nothing is drawn where there is nothing.
        assert_eq!(super::drawn(&[], [10.0, 0.0]).areas.len(), 0);
    }
}
