package main

import (
	"context"

	"vllmtuner/render"
	"vllmtuner/serverctl/host"
	"vllmtuner/studies/fence"
)

// A doctorStore is the disk that studies would be kept on.
type doctorStore struct {
	Root   string      `json:"root"`
	Mount  fence.Mount `json:"mount"`
	Commit float64     `json:"commit_ms"` // of a small write, until it is on the disk
	Text   string      `json:"text"`      // the same in words
}

// examineStore says whether studies are safe in a directory; "" is none.
func (d *doctor) examineStore(ctx context.Context, root string) {
	if root == "" {
		return
	}
	defer func() { host.Sort(d.Findings); d.Ready = d.count(host.Error) == 0 }()
	find := func(severity host.Severity, have string) {
		d.Findings = append(d.Findings, host.Finding{Severity: severity, What: "studies", Have: have})
	}
	disk, err := examineDisk(ctx, root)
	if err != nil {
		find(host.Error, err.Error())
		return
	}
	d.Store = &doctorStore{Root: root, Mount: disk.Mount, Commit: render.InMilliseconds(disk.Commit), Text: diskText(disk)}
	for _, text := range disk.Warnings {
		find(host.Warning, text)
	}
}
