//! Bytes on top of each other in cells: each column has layers from the bottom up. A cell shows eighths, so that a picture of four rows
//! has thirty-two heights.

use plimsoll_plan::Colour;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

use super::Colours;

/// Eighths of a cell, from the bottom.
const EIGHTHS: [&str; 9] = [" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"];
/// What tells layers apart where there are no colours.
const PATTERNS: [&str; 6] = ["█", "▒", "▓", "░", "▚", "▤"];

/// A layer of a column: its number, its colour, its bytes.
pub type Layer = (usize, Colour, u64);

/// Draws columns from the left, one for each column of the area, in a picture that is `top` bytes high.
pub fn draw(buffer: &mut Buffer, area: Rect, columns: &[Vec<Layer>], top: u64, colours: Colours) {
    let heights = u64::from(area.height) * 8;
    let height_of = |bytes: u64| {
        let share = bytes as f64 / top.max(1) as f64;
        ((share * heights as f64).round() as u64).min(heights)
    };
    for (x, layers) in (area.x..area.right()).zip(columns) {
        let mut ends: Vec<(u64, usize, Colour)> = Vec::with_capacity(layers.len());
        let mut sum = 0u64;
        for (number, colour, bytes) in layers {
            sum = sum.saturating_add(*bytes);
            ends.push((height_of(sum), *number, *colour));
        }
        for row in 0..area.height {
            let y = area.bottom() - 1 - row;
            let bottom = u64::from(row) * 8;
            cell(buffer, (x, y), &ends, bottom, colours);
        }
    }
}

/// Which layer is at a height; `None` above all.
fn at(ends: &[(u64, usize, Colour)], height: u64) -> Option<(usize, Colour)> {
    ends.iter().find(|(end, _, _)| height < *end).map(|(_, number, colour)| (*number, *colour))
}

/// The cell whose lowest eighth is at a height.
fn cell(
    buffer: &mut Buffer,
    place: (u16, u16),
    ends: &[(u64, usize, Colour)],
    bottom: u64,
    colours: Colours,
) {
    let parts: Vec<Option<(usize, Colour)>> = (bottom..bottom + 8).map(|height| at(ends, height)).collect();
    let Some(Some(first)) = parts.first().copied() else { return };
    let filled = parts.iter().take_while(|part| **part == Some(first)).count();
    // Of what is above it in the cell, the part that has most.
    let above = parts.iter().skip(filled);
    let rest = above.clone().max_by_key(|part| above.clone().filter(|other| other == part).count());
    let rest = rest.copied().flatten();
    let Some(cell) = buffer.cell_mut(place) else { return };
    match (colours.paint(first.1), rest.and_then(|(_, colour)| colours.paint(colour))) {
        (Some(colour), behind) => {
            cell.set_symbol(EIGHTHS.get(filled).copied().unwrap_or("█"));
            let style = Style::new().fg(colour);
            cell.set_style(behind.map_or(style, |behind| style.bg(behind)));
        }
        (None, _) => {
            let largest =
                if filled >= 4 || rest.is_none() { first.0 } else { rest.map_or(first.0, |own| own.0) };
            let is_seen = parts.iter().filter(|part| part.is_some()).count() >= 4;
            let pattern = PATTERNS.get(largest % PATTERNS.len()).copied().unwrap_or("█");
            cell.set_symbol(if is_seen { pattern } else { " " });
        }
    }
}

/// What stands for a layer in a legend.
pub fn swatch(number: usize, colour: Colour, colours: Colours) -> (&'static str, Style) {
    match colours.paint(colour) {
        Some(colour) => ("█", Style::new().fg(colour)),
        None => (PATTERNS.get(number % PATTERNS.len()).copied().unwrap_or("█"), Style::new()),
    }
}

/// Draws a horizontal line at a height, over what is there.
pub fn line(buffer: &mut Buffer, area: Rect, bytes: u64, top: u64, style: Style) {
    if bytes > top || area.height == 0 {
        return;
    }
    let share = bytes as f64 / top.max(1) as f64;
    let row = ((share * f64::from(area.height)).ceil() as u16).clamp(1, area.height);
    let y = area.bottom() - row;
    for x in area.x..area.right() {
        if let Some(cell) = buffer.cell_mut((x, y)) {
            let behind = if cell.symbol() == "█" { cell.style().fg } else { cell.style().bg };
            cell.set_symbol("─").set_style(style);
            if let Some(behind) = behind {
                cell.set_bg(behind);
            }
        }
    }
}

/// Columns of a width, from more or fewer: of several, the one that holds most.
pub fn fitted(columns: &[Vec<Layer>], width: usize) -> Vec<Vec<Layer>> {
    let total = |column: &Vec<Layer>| column.iter().fold(0u64, |sum, layer| sum.saturating_add(layer.2));
    (0..width)
        .filter_map(|x| {
            let begin = x * columns.len() / width;
            let end = ((x + 1) * columns.len() / width).max(begin + 1).min(columns.len());
            columns.get(begin..end)?.iter().max_by_key(|column| total(column)).cloned()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(columns: &[Vec<Layer>], top: u64, colours: Colours, height: u16) -> Vec<String> {
        let area = Rect::new(0, 0, columns.len() as u16, height);
        let mut buffer = Buffer::empty(area);
        draw(&mut buffer, area, columns, top, colours);
        let row = |y| (0..area.width).map(|x| buffer[(x, y)].symbol().to_owned()).collect::<String>();
        (0..height).map(row).collect()
    }

    #[test]
    fn heights_are_eighths_of_a_cell() {
        let columns: Vec<Vec<Layer>> = (0..=4).map(|n| vec![(0, [0, 0, 0], 25 * n)]).collect();
        assert_eq!(drawn(&columns, 100, Colours::True, 1), [" ▂▄▆█"]);
        assert_eq!(drawn(&columns, 100, Colours::True, 2), ["   ▄█", " ▄███"]);
        // More than there is room for.
        assert_eq!(drawn(&columns, 50, Colours::True, 1), [" ▄███"]);
    }

    #[test]
    fn layers_are_apart_by_colour_or_by_pattern() {
        let column = vec![vec![(0, [255, 0, 0], 50), (1, [0, 255, 0], 25)]];
        let area = Rect::new(0, 0, 1, 1);
        let mut buffer = Buffer::empty(area);
        draw(&mut buffer, area, &column, 100, Colours::True);
        let cell = &buffer[(0, 0)];
        assert_eq!(cell.symbol(), "▄");
        assert_eq!(cell.fg, ratatui::style::Color::Rgb(255, 0, 0));
        assert_eq!(drawn(&column, 100, Colours::None, 4), [" ", "▒", "█", "█"]);
    }

    #[test]
    fn of_many_columns_the_highest_are_seen() {
        let columns: Vec<Vec<Layer>> =
            (0..100).map(|n| vec![(0, [0; 3], if n == 57 { 9 } else { 1 })]).collect();
        let heights: Vec<u64> = fitted(&columns, 10).iter().map(|column| column[0].2).collect();
        assert_eq!(heights, [1, 1, 1, 1, 1, 9, 1, 1, 1, 1]);
        assert_eq!(fitted(&columns[..2], 6).len(), 6);
        assert!(fitted(&[], 6).is_empty());
    }
}
