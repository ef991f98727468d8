//! `strftime` for templates that write the date: Python's directives, in UTC and in English.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// The time as the format says.
///
/// # Errors
/// The format has a directive that is not known.
pub fn format_time(format: &str, time: SystemTime) -> Result<String, String> {
    let seconds = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_secs()).map_or(i64::MIN, |s| -s),
    };
    let date = Date::of_day(seconds.div_euclid(86_400));
    let second_of_day = seconds.rem_euclid(86_400);
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let twelve = (hour + 11) % 12 + 1;
    let (day_name, month_name) = (date.day_name(), date.month_name());
    let short = |name: &'static str| name.get(..3).unwrap_or(name);
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = rest.next();
        // `%-d` is `%d` without the zero in front.
        let unpadded = directive == Some('-');
        if unpadded {
            directive = rest.next();
        }
        let mut number = |value: i64, width: usize| {
            // Writing to a text cannot fail.
            let _ = if unpadded { write!(out, "{value}") } else { write!(out, "{value:0width$}") };
        };
        match directive {
            Some('Y') => number(date.year, 4),
            Some('y') => number(date.year.rem_euclid(100), 2),
            Some('m') => number(date.month, 2),
            Some('d') => number(date.day, 2),
            Some('j') => number(date.day_of_year, 3),
            Some('H') => number(hour, 2),
            Some('I') => number(twelve, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(short(month_name)),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(short(day_name)),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('F') => out.push_str(&format!("{:04}-{:02}-{:02}", date.year, date.month, date.day)),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('Z') => out.push_str("UTC"),
            Some('z') => out.push_str("+0000"),
            Some('%') => out.push('%'),
            Some(other) => return Err(format!("strftime_now: %{other} is not known")),
            None => return Err("strftime_now: the format ends with %".to_owned()),
        }
    }
    Ok(out)
}

/// A day of the Gregorian calendar.
struct Date {
    year: i64,
    month: i64,
    day: i64,
    day_of_year: i64,
    /// From Monday.
    weekday: usize,
}

impl Date {
    /// Days since 1970-01-01. Hinnant, "chrono-Compatible Low-Level Date Algorithms": years begin in March,
    /// so that the day that a leap year adds is its last.
    fn of_day(days: i64) -> Date {
        let since_era = days.saturating_add(719_468);
        let era = since_era.div_euclid(146_097);
        let day_of_era = since_era.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_from_march + 2) / 153;
        let day = day_from_march - (153 * month_from_march + 2) / 5 + 1;
        let month = (month_from_march + 2) % 12 + 1;
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let day_of_year = match month {
            1 | 2 => day_from_march - 305,
            _ => day_from_march + 60 + i64::from(leap),
        };
        let weekday = (days + 3).rem_euclid(7) as usize;
        Date { year, month, day, day_of_year, weekday }
    }

    fn day_name(&self) -> &'static str {
        DAYS.get(self.weekday).copied().unwrap_or_default()
    }

    fn month_name(&self) -> &'static str {
        MONTHS.get((self.month - 1) as usize).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_written_as_python_does() {
        let check = |seconds: u64, format: &str, expected: &str| {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(format_time(format, time).unwrap(), expected);
        };
        check(0, "%A %d %B %Y, day %j, %H:%M:%S %p", "Thursday 01 January 1970, day 001, 00:00:00 AM");
        check(951_827_696, "%d %b %Y %-d %-m %y", "29 Feb 2000 29 2 00");
        check(951_827_696, "%a %F %T %I %Z %z %%", "Tue 2000-02-29 12:34:56 12 UTC +0000 %");
        check(1_735_689_599, "%j %F", "366 2024-12-31");
        check(1_740_873_600, "%j %A", "061 Sunday");
        let before = UNIX_EPOCH - Duration::from_secs(1);
        assert_eq!(format_time("%F %T", before).unwrap(), "1969-12-31 23:59:59");
        assert!(format_time("%Q", UNIX_EPOCH).unwrap_err().contains("%Q"));
        assert!(format_time("50%", UNIX_EPOCH).is_err());
    }
}
