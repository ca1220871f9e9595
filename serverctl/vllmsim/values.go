package vllmsim

import (
	"errors"
	"strings"
)

// RefusedValues says which flags of a command line have a value that no version of vLLM takes, in vLLM's own words. A flag
// that no version knows is not looked at.
func RefusedValues(args []string) []string {
	var all []string
	for len(args) > 0 {
		end := 1
		for end < len(args) && (!strings.HasPrefix(args[end], "-") || negativeNumber.MatchString(args[end])) {
			end++
		}
		if text := refusedValue(args[:end]); text != "" {
			all = append(all, text)
		}
		args = args[end:]
	}
	return all
}

// refusedValue says what the newest version says of one flag with its values; "" where a version takes it.
func refusedValue(words []string) (text string) {
	name, _, _ := strings.Cut(words[0], "=")
	name = strings.ReplaceAll(name, "_", "-")
	for _, version := range Versions {
		p := parserOf(version)
		if p.named[name] == nil {
			continue
		}
		_, err := p.parse(words)
		wrong, refused := errors.AsType[*UsageError](err)
		if !refused {
			return ""
		}
		text = wrong.Text
	}
	return text
}
