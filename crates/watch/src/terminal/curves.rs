//! Numbers over the steps: loss, speed, learning rate.

use plimsoll_report::{Bucket, count};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use ratatui::symbols::Marker;
use ratatui::text::Span;
use ratatui::widgets::Widget;
use ratatui::widgets::canvas::{Canvas, Line, Points};

use super::{Look, Panel, titled};
use crate::view::View;

/// Columns of the labels at the left.
const LABELS: u16 = 8;

pub fn draw(buffer: &mut Buffer, area: Rect, panel: Panel, view: &View, look: &Look) {
    let below = titled(buffer, area, panel, title(panel, view, look), look);
    let points = view.curve.points(look.window());
    let value = |point: &Bucket| match panel {
        Panel::Loss => point.loss,
        Panel::Speed => point.tokens_per_second,
        _ => point.lr,
    };
    let values: Vec<(f64, f64)> =
        points.iter().filter_map(|point| Some((point.to as f64, value(point)?))).collect();
    let (Some(first), Some(last)) = (values.first(), values.last()) else { return };
    if below.height < 2 || below.width < LABELS + 6 {
        return;
    }
    let marks: Vec<(f64, f64)> = match panel {
        Panel::Loss => view
            .validation
            .iter()
            .map(|(step, loss)| (*step as f64, *loss))
            .filter(|(step, _)| *step >= first.0)
            .collect(),
        _ => Vec::new(),
    };
    let planned = view.plan.as_ref().map(|plan| plan.tokens_per_second).filter(|_| panel == Panel::Speed);
    let all = values.iter().chain(&marks).map(|(_, value)| *value).chain(planned);
    let [least, most] = range(all, panel != Panel::Loss);
    let plot = Rect { x: below.x + LABELS, width: below.width - LABELS, height: below.height - 1, ..below };
    labels(buffer, below, plot, panel, ([first.0, last.0], [least, most]), look);
    let colour = |style: Style| style.fg.unwrap_or(Color::Reset);
    let (curve, beside) = (colour(look.colours.accent()), colour(look.colours.second()));
    let changes = view.rungs.iter().map(|(step, _)| *step as f64).filter(|step| *step > first.0);
    let changes: Vec<f64> = changes.collect();
    Canvas::default()
        .marker(Marker::Braille)
        .x_bounds([first.0, if last.0 > first.0 { last.0 } else { first.0 + 1.0 }])
        .y_bounds([least, most])
        .paint(|context| {
            for step in &changes {
                context.draw(&Line::new(*step, least, *step, most, Color::DarkGray));
            }
            if let Some(planned) = planned {
                // Every other piece, so that it is no curve.
                let piece = (last.0 - first.0).max(1.0) / 24.0;
                for n in (0..24).step_by(2) {
                    let begin = first.0 + f64::from(n) * piece;
                    context.draw(&Line::new(begin, planned, begin + piece, planned, Color::DarkGray));
                }
            }
            context.layer();
            for pair in values.windows(2) {
                if let [(x1, y1), (x2, y2)] = pair {
                    context.draw(&Line::new(*x1, *y1, *x2, *y2, curve));
                }
            }
            context.draw(&Points::new(&values[..1], curve));
            context.layer();
            for (step, loss) in &marks {
                context.print(*step, *loss, Span::styled("o", Style::new().fg(beside)));
            }
        })
        .render(plot, buffer);
}

/// What is most worth knowing first, since a narrow panel shows no more.
fn title<'a>(panel: Panel, view: &View, look: &Look) -> Vec<Span<'a>> {
    let Some(last) = &view.last else { return Vec::new() };
    match panel {
        Panel::Loss => {
            let validation = view.validation.last().map(|(_, loss)| format!("o {loss:.4} "));
            let first = view.first_loss.map(|first| format!("from {first:.3}"));
            vec![
                Span::raw(format!("{:.4} ", last.loss)),
                Span::styled(validation.unwrap_or_default(), look.colours.second()),
                Span::raw(first.unwrap_or_default()),
            ]
        }
        Panel::Speed => {
            let planned = view.plan.as_ref().map(|plan| format!(" of {:.0} planned", plan.tokens_per_second));
            vec![Span::raw(format!("{:.0}{}", last.tokens_per_second, planned.unwrap_or_default()))]
        }
        _ => vec![Span::raw(format!("{:.2e}", last.lr))],
    }
}

/// The range of an axis around values; from 0 on where it counts something.
fn range(values: impl Iterator<Item = f64>, from_zero: bool) -> [f64; 2] {
    let values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    match (from_zero, least.is_finite() && most.is_finite()) {
        (_, false) => [0.0, 1.0],
        (true, _) => [0.0, 1.1 * most.max(f64::MIN_POSITIVE)],
        (false, _) => {
            let room = 0.06 * (most - least).max(1e-3 * most.abs()).max(1e-9);
            // What is never below zero has no room there.
            [if least >= 0.0 { (least - room).max(0.0) } else { least - room }, most + room]
        }
    }
}

/// The highest and the lowest value at the left, the first and the last step below.
fn labels(
    buffer: &mut Buffer,
    area: Rect,
    plot: Rect,
    panel: Panel,
    ([first, last], [least, most]): ([f64; 2], [f64; 2]),
    look: &Look,
) {
    let words = |value: f64| match panel {
        Panel::Loss => format!("{value:.3}"),
        Panel::Speed => format!("{value:.0}"),
        _ => format!("{value:.1e}"),
    };
    let style = look.colours.faint();
    let rows = [(plot.y, most), (plot.bottom() - 1, least)];
    for (y, value) in rows.into_iter().take(usize::from(plot.height.min(2))) {
        let text = format!("{:>7} ", words(value));
        buffer.set_stringn(area.x, y, text, usize::from(LABELS), style);
    }
    let y = plot.bottom();
    let [first, last] = [first, last].map(|step| count(step as u64));
    buffer.set_stringn(plot.x, y, &first, usize::from(plot.width), style);
    let wide = last.chars().count() as u16;
    if u32::from(wide) + first.chars().count() as u32 + 1 < u32::from(plot.width) {
        buffer.set_stringn(plot.right() - wide, y, &last, usize::from(wide), style);
    }
}
