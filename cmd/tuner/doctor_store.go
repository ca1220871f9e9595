package main

import (
	"context"
	"fmt"
	"time"

	"vllmtuner/serverctl/host"
	"vllmtuner/studies"
	"vllmtuner/studies/fence"
)

// A doctorStore is the disk that studies would be kept on.
type doctorStore struct {
	Root   string      `json:"root"`
	Mount  fence.Mount `json:"mount"`
	Commit float64     `json:"commit_ms"` // of a small write, until it is on the disk
	Text   string      `json:"text"`      // the same in words
}

// storePatience is how long the disk may take to answer. One on a network whose server is gone never does.
const storePatience = time.Minute

// examineDisk is studies.ExamineDisk with that patience.
func examineDisk(ctx context.Context, dir string) (studies.Disk, error) {
	silent := fmt.Errorf("%s does not answer within %s: see that its server runs and can be reached; nfsstat -m and dmesg say more", dir, storePatience)
	ctx, cancel := context.WithTimeoutCause(ctx, storePatience, silent)
	defer cancel()
	return answered(ctx, func() (studies.Disk, error) { return studies.ExamineDisk(dir) })
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
	d.Store = &doctorStore{Root: root, Mount: disk.Mount, Commit: milliseconds(disk.Commit), Text: diskText(disk)}
	for _, text := range disk.Warnings {
		find(host.Warning, text)
	}
}
