package live

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"vllmtuner/serverctl/proc"
)

func TestCheckRecord(t *testing.T) {
	for _, row := range []struct {
		name, text string
		want       string // a part of the error; empty means no error
	}{
		{"a record of this version", "", ""},
		{"a record that was cut off", `{"pid": 4`, "server.json names the server that a killed run may have left, but it cannot be read: it names no server"},
		{"no process", `{"token": "abc"}`, "it names no server; check that no such server runs, then remove the file"},
	} {
		t.Run(row.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := writeRecord(dir, proc.Record{PID: 1 << 30, Token: "abc"}); err != nil {
				t.Fatal(err)
			}
			if row.text != "" {
				if err := os.WriteFile(filepath.Join(dir, recordFile), []byte(row.text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			err := CheckRecord(dir)
			if _, isRecord := errors.AsType[*RecordError](err); row.want == "" && err != nil || row.want != "" && (!isRecord || !strings.Contains(err.Error(), row.want)) {
				t.Errorf("CheckRecord = %v, want %q", err, row.want)
			}
		})
	}
	if err := CheckRecord(t.TempDir()); err != nil {
		t.Errorf("without a record, CheckRecord = %v", err)
	}
}
