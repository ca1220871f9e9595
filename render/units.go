package render

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Count writes a number of things: "1 probe", "2 probes", "3 studies".
func Count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	switch {
	case strings.HasSuffix(thing, "y"):
		thing = strings.TrimSuffix(thing, "y") + "ies"
	case strings.HasSuffix(thing, "s"), strings.HasSuffix(thing, "x"), strings.HasSuffix(thing, "ch"):
		thing += "es"
	default:
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

// Done writes how many things are done: "12 of 30 trials done". all is 0 if it is not known.
func Done(n, all int, thing string) string {
	if all <= 0 {
		return Count(n, thing) + " done"
	}
	return Of(n, all, thing) + " done"
}

// Of writes some of a number of things: "3 of 12 requests", "1 of 1 request".
func Of(n, all int, thing string) string { return fmt.Sprintf("%d of %s", n, Count(all, thing)) }

// All writes all of a number of things: "all 12 requests", or "the only request".
func All(n int, thing string) string {
	if n == 1 {
		return "the only " + thing
	}
	return "all " + Count(n, thing)
}

// Are writes a number of things with the verb: "1 request is", "2 requests are".
func Are(n int, thing string) string {
	if n == 1 {
		return Count(n, thing) + " is"
	}
	return Count(n, thing) + " are"
}

// Percent writes a relative difference with its sign, such as "+4 %" for 0.04.
func Percent(f float64) string { return Signed(100*f) + " %" }

// Share writes a share of a whole: "43 %", "1.3 %" or "< 0.1 %".
func Share(f float64) string {
	switch {
	case f < 0.0005:
		return "< 0.1 %"
	case f < 0.0995:
		return fmt.Sprintf("%.1f %%", 100*f)
	}
	return fmt.Sprintf("%.0f %%", 100*f)
}

// Signed writes a whole number with its sign, and zero without a sign.
func Signed(f float64) string {
	if text := fmt.Sprintf("%+.0f", f); text != "+0" && text != "-0" {
		return text
	}
	return "0"
}

// Span writes a duration: "34 s", "2 min 10 s", "46 min", "2 h 03 min".
func Span(d time.Duration) string {
	d = d.Round(time.Second)
	switch minutes := int(d.Round(time.Minute).Minutes()); {
	case d < time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < 10*time.Minute:
		if seconds := int(d.Seconds()) % 60; seconds > 0 {
			return fmt.Sprintf("%d min %d s", int(d.Minutes()), seconds)
		}
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case minutes < 60:
		return fmt.Sprintf("%d min", minutes)
	default:
		return fmt.Sprintf("%d h %02d min", minutes/60, minutes%60)
	}
}

// Took writes a duration that may be short, and from 10 s on as Span does: "710 µs", "2.3 ms", "4.2 s", "2 min 10 s".
func Took(d time.Duration) string {
	switch ms := InMilliseconds(d); {
	case d == 0 || ms >= 9950:
		return Span(d)
	case ms >= 999.5:
		return Digits(d.Seconds(), 2) + " s"
	case ms >= 0.9995:
		return Digits(ms, 2) + " ms"
	default:
		return Digits(1000*ms, 2) + " µs"
	}
}

// Left writes the remaining time, such as "about 6 min left"; "" if it is below a second or not known.
func Left(d time.Duration) string {
	if d < time.Second {
		return ""
	}
	return "about " + Span(d) + " left"
}

// bar draws a share as a bar of n columns.
func bar(share float64, n int) string {
	full := int(math.Round(min(1, max(0, share)) * float64(n)))
	return strings.Repeat("█", full) + strings.Repeat("░", n-full)
}

// Number writes a figure with three significant digits and without an exponent.
func Number(f float64) string { return Digits(f, 3) }

// Digits writes a figure with n significant digits and without an exponent. It keeps all digits before the point.
func Digits(f float64, n int) string {
	if math.Abs(f) >= math.Pow10(n)-0.5 {
		return fmt.Sprintf("%.0f", f)
	}
	return fmt.Sprintf("%.*g", n, f)
}

// Milliseconds writes a latency in milliseconds. It writes one decimal for values below 100, and no decimal for others.
func Milliseconds(ms float64) string {
	if ms < 100 {
		return fmt.Sprintf("%.1f", ms)
	}
	return fmt.Sprintf("%.0f", ms)
}

// Bytes writes a number of bytes, such as "64 MiB" or "23.5 GiB".
func Bytes(n int64) string {
	const units = "KMGTPE"
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	v, unit := float64(n)/1024, 0
	for ; v >= 999.95 && unit < len(units)-1; unit++ {
		v /= 1024
	}
	text := strconv.FormatFloat(v, 'f', 1, 64)
	return fmt.Sprintf("%s %ciB", strings.TrimSuffix(text, ".0"), units[unit])
}

// InMilliseconds returns a duration as a number of milliseconds.
func InMilliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Thousands writes a whole number with a comma between thousands, such as "12,345". The number must not be negative.
func Thousands(n float64) string {
	text := strconv.FormatFloat(n, 'f', 0, 64)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
