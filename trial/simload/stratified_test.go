package simload

import (
	"fmt"
	"strings"
)

// strata is the number of requests in a typical burst, and a sixth of the shortest window.
const strata = 50

// A stratified has the results of our search in a world with independent lengths and with stratified lengths.
type stratified struct {
	world, setting string
	bias, sd       [2]float64
}

// stratify measures again with stratified lengths. The truth is still that of the original workload.
func (s study) stratify(reps int) (rows []stratified, err error) {
	even := *s.source.(*population)
	even.strata = strata
	other := s
	other.source = &even
	for _, m := range []method{{"ours, search", ours(searchLengths, 0)}, {"ours, confirmation", ours(confirmLengths, 0)}} {
		row := stratified{world: s.name, setting: m.name}
		for i, of := range []study{s, other} {
			f, err := of.repeat(m, stratumDraws, reps)
			if err != nil {
				return nil, err
			}
			row.bias[i], row.sd[i] = meanSD(f.errors(s.capacity))
		}
		rows = append(rows, row)
	}
	return rows, nil
}

const stratifiedHead = `
## What stratified draws would buy

The same searches with lengths of prompts and of answers that fill their distribution evenly in each %d requests, as against lengths drawn one by
one. Bias and SD in %%, against the truth of the latter. They are not used.

| world | setting | bias, one by one | stratified | SD, one by one | stratified |
|---|---|---|---|---|---|
`

func (r report) evened(b *strings.Builder) {
	if len(r.stratified) == 0 {
		return
	}
	fmt.Fprintf(b, stratifiedHead, strata)
	for _, row := range r.stratified {
		fmt.Fprintf(b, "| %s | %s | %+.1f | %+.1f | %.1f | %.1f |\n", row.world, row.setting, row.bias[0], row.bias[1], row.sd[0], row.sd[1])
	}
}
