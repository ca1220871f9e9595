//go:build nfs

package studies

import (
	"bufio"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"vllmtuner/studies/nfslab/pause"
)

// These environment variables configure a child on real NFS. childPause is POINT:PAGE:FILE and says where the child
// pauses (see pause.StopAt). The other two variables are for a plain database, see openPlain: its journal mode and the
// number of commits.
const (
	childPause   = "STUDIES_TEST_PAUSE"
	childJournal = "STUDIES_TEST_JOURNAL"
	childCommits = "STUDIES_TEST_COMMITS"
)

func init() {
	childRoles["write"] = func(dir string) error { return runPaused(dir, writeUntilKilled) }
	childRoles["plain-write"] = func(dir string) error { return runPaused(dir, writePlain) }
	childRoles["power-off"] = powerOff
	childRoles["plain-count"] = countPlain
	childRoles["plain-verify"] = verifyPlain
}

// runPaused first sets where this process pauses, and then calls the function of a role.
func runPaused(dir string, role func(string) error) error {
	if at := strings.SplitN(os.Getenv(childPause), ":", 3); len(at) == 3 {
		page, err := strconv.Atoi(at[1])
		if err != nil {
			return err
		}
		if err := pause.StopAt(pause.Point(at[0]), page, at[2]); err != nil {
			return err
		}
	}
	return role(dir)
}

// openPlain opens a plain database: one SQLite file without a study's epochs and slots, which only SQLite's own locks
// protect.
func openPlain(dir, mode string) (*sql.DB, error) {
	return openFile(filepath.Join(dir, "study.db"), "mode="+mode+"&_journal_mode="+os.Getenv(childJournal)+
		"&_synchronous=FULL&_txlock=immediate&_busy_timeout=90000")
}

// A commit adds plainRows rows of plainText bytes each. That is enough to move rows of earlier commits from page to
// page.
const (
	plainRows = 4
	plainText = 1500
)

// writePlain makes commits, and prints a line for each acknowledged row. Each new row goes before the existing ones.
func writePlain(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	db, err := openPlain(dir, "rwc")
	if err != nil {
		return err
	}
	if _, err := db.Exec(`CREATE TABLE IF NOT EXISTS probes (seq INTEGER PRIMARY KEY, text TEXT)`); err != nil {
		return err
	}
	commits, _ := strconv.Atoi(os.Getenv(childCommits))
	for n := 1; commits == 0 || n <= commits; n++ {
		var first int
		err := transact(db, func(tx *transaction) error {
			if err := tx.tx.QueryRow(`SELECT coalesce(min(seq), 1000000) FROM probes`).Scan(&first); err != nil {
				return err
			}
			for i := range plainRows {
				tx.exec(`INSERT INTO probes VALUES (?, ?)`, first-1-i, strings.Repeat("x", plainText))
			}
			return nil
		})
		if err != nil {
			return err
		}
		for i := range plainRows {
			fmt.Println("ack", first-1-i)
		}
	}
	return db.Close()
}

// countPlain prints the number of rows, as a reader would.
func countPlain(dir string) error {
	db, err := openPlain(dir, "ro")
	if err != nil {
		return err
	}
	var n int
	if err := db.QueryRow(`SELECT count(*) FROM probes`).Scan(&n); err != nil {
		return err
	}
	fmt.Println(n, "rows")
	return db.Close()
}

// verifyPlain opens the database as a successor does. It checks that the database has all rows that standard input
// lists as acknowledged.
func verifyPlain(dir string) error {
	db, err := openPlain(dir, "rw")
	if err != nil {
		return err
	}
	acked, lost, damage := 0, 0, ""
	if err := db.QueryRow("PRAGMA integrity_check(1)").Scan(&damage); err != nil {
		damage = err.Error()
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var seq, found int
		if _, err := fmt.Sscanf(lines.Text(), "ack %d", &seq); err != nil {
			continue
		}
		acked++
		if err := db.QueryRow(`SELECT count(*) FROM probes WHERE seq=? AND length(text)=?`, seq, plainText).Scan(&found); err != nil {
			found = 0 // the variable damage has the reason
		}
		lost += 1 - found
	}
	if lost > 0 {
		return fmt.Errorf("lost %d of %d acknowledged rows, integrity: %s", lost, acked, damage)
	}
	fmt.Printf("all %d acknowledged rows are there, integrity: %s\n", acked, damage)
	return db.Close()
}

// powerOff acts as a power cut: the file system loses all unsynced data and stops (FS_IOC_SHUTDOWN without a flush of
// the file system's log).
func powerOff(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(unix.IoctlSetPointerInt(int(f.Fd()), 0x8004587d, 2), f.Close())
}
