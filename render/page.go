package render

import (
	"fmt"
	"io"
	"strings"
)

// A Page shows a text that changes. On a terminal each text replaces the last one. Elsewhere each text is written below
// the last one.
type Page struct {
	w       io.Writer
	draws   bool   // w is a terminal; texts are shown on its alternate screen
	begun   bool   // the alternate screen is shown
	version string // version of the last text
}

// NewPage returns a page on w. The caller must call Leave or End.
func NewPage(w io.Writer) *Page { return &Page{w: w, draws: canDraw(w)} }

// Show writes a text. On a terminal it replaces the old text line by line, to avoid flicker, and leaves out lines that
// do not fit. Elsewhere it writes the text only if its version is new.
func (p *Page) Show(text, version string) error {
	if !p.draws {
		return p.add(text, version)
	}
	head := goHome
	if !p.begun {
		p.begun = true
		head = otherPage + goHome
	}
	_, height, _ := terminalSize(p.w)
	lines := strings.Split(strings.TrimSuffix(filtered(p.w, text), "\n"), "\n")
	if room := height - 1; room > 0 && len(lines) > room {
		lines = append(lines[:room-1], "…")
	}
	_, err := io.WriteString(unfiltered(p.w), head+strings.Join(lines, eraseLine+"\r\n")+eraseLine+"\r\n"+eraseDown)
	return err
}

func (p *Page) add(text, version string) error {
	if version == p.version {
		return nil
	}
	gap := ""
	if p.version != "" {
		gap = "\n"
	}
	p.version = version
	_, err := io.WriteString(p.w, gap+text)
	return err
}

// Leave returns from the alternate screen to the terminal's normal screen.
func (p *Page) Leave() {
	if p.begun {
		p.begun = false
		fmt.Fprint(unfiltered(p.w), firstPage)
	}
}

// End leaves the alternate screen and writes a last text that stays.
func (p *Page) End(text string) error {
	p.Leave()
	return p.add(text, "end")
}
