package sim

import (
	"errors"
	"strings"
)

// RefusedValues finds the flags of a command line whose values no simulated version accepts. It returns vLLM's error
// for each of these flags. RefusedValues ignores flags that no version knows.
func RefusedValues(args []string) (refusals []string) {
	for len(args) > 0 {
		end := 1
		for end < len(args) && (!strings.HasPrefix(args[end], "-") || negativeNumber.MatchString(args[end])) {
			end++
		}
		if text := refusedValue(args[:end]); text != "" {
			refusals = append(refusals, text)
		}
		args = args[end:]
	}
	return refusals
}

// refusedValue returns the newest version's error for one flag with its values; it returns "" if a version accepts
// them.
func refusedValue(words []string) (text string) {
	name, _, _ := strings.Cut(words[0], "=")
	name = strings.ReplaceAll(name, "_", "-")
	for _, version := range Versions {
		p := parserOf(version)
		if p.named[name] == nil {
			continue
		}
		_, _, err := p.parse(words)
		refusal, refused := errors.AsType[*UsageError](err)
		if !refused {
			return ""
		}
		text = refusal.Text
	}
	return text
}
