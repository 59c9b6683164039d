// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The line reader of smtp-server with our reader for messages, and with an eye on what a client may
 * not send: lines without CR, and anything behind a command whose reply it has to wait for.
 */
import { SMTPStream } from "smtp-server/lib/smtp-stream.js"
import type * as SmtpData from "../src/mail/SmtpData.ts"

/** Octets of a command line: RFC 5321 section 4.5.3.1.4 asks for 512, long paths need more. */
const maxCommand = 2048

/** No command holds NUL, so one in front of LF marks that CR was missing there. */
const mark = "\0"
const bareLf = /(?<!\r)\n/g

/** Whether a line, as `oncommand` has it, ended with LF alone (RFC 5321 section 2.3.8). */
export const isBare = (line: Uint8Array): boolean => line.at(-1) === 0

type Next = (error?: Error | null) => void

export class Reader extends SMTPStream {
  #incoming: SmtpData.Incoming | undefined
  #finished: () => void = () => undefined
  #resume: () => void = () => undefined
  #paused: ((isEarly: boolean) => void) | undefined
  /** Octets of the segment that is being read, 0 = none is. */
  #segmentBytes = 0

  constructor() {
    super({ maxCommandLength: maxCommand })
  }

  /**
   * To be called within a command, before its `done`: calls `then` in place of looking for the
   * next line. `isEarly` = the client has sent more already. What that is, is dropped.
   */
  pause(then: (isEarly: boolean) => void): void {
    this.#paused = then
    this._dataMode = true
  }

  /** Reads a message up to its end; nothing behind it is looked at before `proceed`. */
  receive(incoming: SmtpData.Incoming, finished: () => void): void {
    this.#incoming = incoming
    this.#finished = finished
    this._dataMode = true
  }

  proceed(): void {
    this.#resume()
  }

  /** Gets segments of the socket, and from the library the rest of one when the mode changes. */
  override _write(octets: Buffer, encoding: BufferEncoding | "buffer", next: Next): void {
    if (this.#segmentBytes > 0) return this.#read(octets, encoding, next)
    this.#segmentBytes = octets.length
    this.#read(octets, encoding, (error) => {
      this.#segmentBytes = 0
      next(error)
    })
  }

  #read(octets: Buffer, encoding: BufferEncoding | "buffer", next: Next): void {
    const paused = this.#paused
    if (paused !== undefined) {
      this.#paused = undefined
      this._dataMode = false
      paused(octets.length > 0 || this.writableLength > this.#segmentBytes)
      return next()
    }
    if (this._dataMode) return super._write(octets, encoding, next)
    const text = this._remainder + octets.toString("latin1")
    const marked = text.replace(bareLf, `${mark}\n`)
    if (marked === text) return super._write(octets, encoding, next)
    this._remainder = ""
    super._write(Buffer.from(marked, "latin1"), encoding, next)
  }

  override _feedDataStream(segment: Buffer, done: Next): void {
    const end = this.#incoming?.push(segment)
    if (end === undefined) return done()
    this.#incoming = undefined
    this._dataMode = false
    this._remainder = ""
    this.#resume = () => this._write(segment.subarray(end), "buffer", done)
    this.#finished()
  }

  /** A last line without its end is no command: the client was cut off while it wrote. */
  override _flushData(): void {}
}
