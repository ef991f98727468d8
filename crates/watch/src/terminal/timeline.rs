//! Memory of the device through the planned step, with its phases.

use plimsoll_memory::{ByteSize, Tag};
use plimsoll_plan::colour_of;
use plimsoll_report::seconds;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use ratatui::text::Span;

use super::{Look, Panel, stack, titled};
use crate::view::View;

pub fn draw(buffer: &mut Buffer, area: Rect, view: &View, look: &Look) {
    let area = titled(buffer, area, Panel::Step, title(view), look);
    if area.height < 2 {
        return;
    }
    let timeline = view.plan.as_ref().map(|plan| &plan.timeline);
    let Some((timeline, tier)) = timeline.and_then(|timeline| Some((timeline, timeline.tiers.first()?)))
    else {
        let words = "the plan is not known, so that there is no time line";
        buffer.set_stringn(area.x + 1, area.y, words, usize::from(area.width), look.colours.faint());
        return;
    };
    let plot = Rect { height: area.height - 1, ..area };
    let columns: Vec<Vec<stack::Layer>> = (0..tier.top.len())
        .map(|column| {
            let layers = tier.live.iter().map(|(tag, bytes)| {
                let colour = Tag::ALL.get(*tag).map_or(plimsoll_plan::OTHER_COLOUR, |tag| colour_of(*tag));
                (*tag, colour, bytes.get(column).copied().unwrap_or(0))
            });
            layers.filter(|(_, _, bytes)| *bytes > 0).collect()
        })
        .collect();
    let fitted = stack::fitted(&columns, usize::from(plot.width));
    stack::draw(buffer, plot, &fitted, tier.peak_bytes.saturating_add(tier.peak_bytes / 20), look.colours);
    // One row of phases, each from the column that it begins in.
    let names = |phase: usize| timeline.phases.get(phase).map_or("", String::as_str);
    let width = usize::from(area.width);
    let phase_at = |x: usize| tier.phase.get(x * tier.phase.len() / width.max(1)).copied();
    let (mut begin, mut odd) = (0, false);
    while begin < width {
        let phase = phase_at(begin);
        let end = (begin..width).find(|x| phase_at(*x) != phase).unwrap_or(width);
        let style = if odd { Style::new().add_modifier(Modifier::REVERSED) } else { look.colours.faint() };
        let wide = end - begin;
        let text = format!("{:^wide$.wide$}", phase.map_or("", names));
        buffer.set_stringn(area.x + begin as u16, plot.bottom(), text, wide, style);
        (begin, odd) = (end, !odd);
    }
}

fn title<'a>(view: &View) -> Vec<Span<'a>> {
    let mut words = Vec::new();
    if let Some(plan) = &view.plan {
        let peak = plan.timeline.tiers.first().map_or(plan.device_bytes, |tier| tier.peak_bytes);
        words.push(format!("device through {}, peak {}", plan.timeline.part, ByteSize(peak)));
        words.push(format!("planned {}", seconds(plan.step_seconds)));
    }
    words.extend(view.step_seconds().map(|took| format!("takes {}", seconds(took))));
    vec![Span::raw(words.join(", "))]
}
