package render

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// units are the units that this program writes behind a number and a blank.
var units = []string{
	"%", "µs", "ms", "s", "min", "h", "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "GB", "GB/s", "MiB/s", "GiB/s", "req/s", "tok/s", "tokens/s",
}

// inFigure reports whether two words that follow each other belong to one figure. A figure is a number with its unit,
// or a sign such as "<=" with its number.
func inFigure(word, next string) bool {
	return isNumber(word) && isUnit(next) || isSign(word) && isNumber(next)
}

// isUnit reports whether a word is a unit. Punctuation may follow the unit.
func isUnit(word string) bool { return slices.Contains(units, strings.TrimRight(word, ".,:;!?)\"")) }

// isSign reports whether a word is a sign that compares with the number behind it, such as "<=".
func isSign(word string) bool {
	return slices.Contains([]string{"<", "<=", "≤", ">", ">=", "≥", "±"}, strings.TrimLeft(word, "("))
}

// isNumber reports whether a word is a number or a range, such as "2.5", "+4", "(0.3" or "2.4–2.6".
func isNumber(word string) bool {
	const digits = "0123456789"
	whole := strings.TrimRight(word, digits)
	return whole != word && strings.Trim(whole, digits+"(\"~≤≥<>+−±.,–-") == ""
}

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

// Done writes how many things are done: "12 of 30 trials done". A total of 0 means that the total is not known.
func Done(n, total int, thing string) string {
	if total <= 0 {
		return Count(n, thing) + " done"
	}
	return Of(n, total, thing) + " done"
}

// Of writes a number of things out of a total: "3 of 12 requests", "1 of 1 request".
func Of(n, total int, thing string) string { return fmt.Sprintf("%d of %s", n, Count(total, thing)) }

// All names all n things: "all 12 requests", or "the only request".
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

// ShortPercent is Percent without a blank, such as "+4%". It is for a place next to another sign, as in ">=+4%".
func ShortPercent(f float64) string { return Signed(100*f) + "%" }

// leastShare is the least share that is written as a number.
const leastShare = 0.0005

// ErrorShare writes an error as a share of the value: "± 4 %", or "< 0.1 %".
func ErrorShare(f float64) string {
	if f < leastShare {
		return Share(f)
	}
	return "± " + Share(f)
}

// Share writes a share of a whole: "43 %", "1.3 %" or "< 0.1 %".
func Share(f float64) string {
	switch {
	case f < leastShare:
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

// Rate writes a rate that was offered or estimated. It has four significant digits, because neighbouring rates may differ
// by less than a percent.
func Rate(f float64) string { return Digits(f, 4) }

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
	const prefixes = "KMGTPE"
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	v, unit := float64(n)/1024, 0
	for ; v >= 999.95 && unit < len(prefixes)-1; unit++ {
		v /= 1024
	}
	text := strconv.FormatFloat(v, 'f', 1, 64)
	return fmt.Sprintf("%s %ciB", strings.TrimSuffix(text, ".0"), prefixes[unit])
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

// Mebibytes writes a size in MiB, as nvidia-smi and DCGM give sizes, such as 68.4 GiB.
func Mebibytes(mib float64) string { return Bytes(int64(mib * (1 << 20))) }
