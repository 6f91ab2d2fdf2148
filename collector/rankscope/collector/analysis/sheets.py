"""CSV and XLSX of a table of texts.

A comparison of 64 ranks has four million cells. The usual writers of XLSX take 5 to 10 µs for each;
here a column becomes cells at once, in 0.2 µs, and the archive is deflated at a low level.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

MOST_ROWS = 1_048_575  # of a sheet, below its header
_LONGEST = 32_767  # characters of a cell
_AT_ONCE = 20_000

_TYPES = """<?xml version="1.0" encoding="UTF-8" standalone="yes"?>
<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"><Default
 Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/><Default
 Extension="xml" ContentType="application/xml"/><Override PartName="/xl/workbook.xml"
 ContentType="application/vnd.openxmlformats-officedocument.spreadsheetml.sheet.main+xml"/><Override
 PartName="/xl/styles.xml"
 ContentType="application/vnd.openxmlformats-officedocument.spreadsheetml.styles+xml"/><Override
 PartName="/xl/worksheets/sheet1.xml"
 ContentType="application/vnd.openxmlformats-officedocument.spreadsheetml.worksheet+xml"/></Types>"""
_RELATIONS = """<?xml version="1.0" encoding="UTF-8" standalone="yes"?>
<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship
 Id="rId1" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
 Target="xl/workbook.xml"/></Relationships>"""
_BOOK = """<?xml version="1.0" encoding="UTF-8" standalone="yes"?>
<workbook xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"
 xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships"><sheets><sheet
 name="compare" sheetId="1" r:id="rId1"/></sheets></workbook>"""
_BOOK_RELATIONS = """<?xml version="1.0" encoding="UTF-8" standalone="yes"?>
<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship
 Id="rId1" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/worksheet"
 Target="worksheets/sheet1.xml"/><Relationship Id="rId2"
 Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/styles"
 Target="styles.xml"/></Relationships>"""
_STYLES = """<?xml version="1.0" encoding="UTF-8" standalone="yes"?>
<styleSheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><fonts count="2">
<font><sz val="11"/><name val="Calibri"/></font><font><b/><sz val="11"/>
<name val="Calibri"/></font></fonts><fills count="4"><fill><patternFill patternType="none"/>
</fill><fill><patternFill
 patternType="gray125"/></fill><fill><patternFill patternType="solid"><fgColor rgb="FFFFEB9C"/>
</patternFill></fill><fill><patternFill patternType="solid"><fgColor rgb="FFFFC7CE"/></patternFill>
</fill></fills><borders count="1"><border/></borders><cellStyleXfs count="1"><xf/></cellStyleXfs>
<cellXfs count="4"><xf/><xf fontId="1" applyFont="1"/><xf fillId="2" applyFill="1"/><xf fillId="3"
 applyFill="1"/></cellXfs></styleSheet>"""
_HEAD = """<?xml version="1.0" encoding="UTF-8" standalone="yes"?>
<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetViews><sheetView
 workbookViewId="0"><pane ySplit="1" topLeftCell="A2" activePane="bottomLeft" state="frozen"/>
</sheetView></sheetViews><sheetData>"""
_NUMBER = r"^-?\d{1,15}(\.\d+)?([eE][-+]?\d+)?$"


def write_csv(table: pa.Table, path: Path) -> None:
    """With a byte order mark, so that spreadsheets read UTF-8."""
    with path.open("wb") as file:
        file.write(b"\xef\xbb\xbf")
        pa_csv.write_csv(table, file)


def write_xlsx(table: pa.Table, path: Path, styles: Sequence[int]) -> int:
    """One sheet; `styles` colours each row: 0 not, 1 yellow, 2 red. Returns how many rows did not
    fit into it."""
    kept = table.slice(0, MOST_ROWS)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("[Content_Types].xml", _TYPES)
        archive.writestr("_rels/.rels", _RELATIONS)
        archive.writestr("xl/workbook.xml", _BOOK)
        archive.writestr("xl/_rels/workbook.xml.rels", _BOOK_RELATIONS)
        archive.writestr("xl/styles.xml", _STYLES)
        with archive.open("xl/worksheets/sheet1.xml", "w", force_zip64=True) as sheet:
            sheet.write(_HEAD.encode())
            titles = "".join(_text(escape(name), 1) for name in kept.schema.names)
            sheet.write(f"<row>{titles}</row>".encode())
            colours = pa.array(["", ' s="2"', ' s="3"']).take(pa.array(styles[: kept.num_rows]))
            for start in range(0, kept.num_rows, _AT_ONCE):
                piece, colour = kept.slice(start, _AT_ONCE), colours.slice(start, _AT_ONCE)
                sheet.write("".join(_rows(piece, colour)).encode())
            sheet.write(b"</sheetData></worksheet>")
    return int(table.num_rows - kept.num_rows)


def _text(content: str, style: int) -> str:
    return f'<c t="inlineStr" s="{style}"><is><t>{content}</t></is></c>'


def _rows(table: pa.Table, colour: pa.Array) -> list[str]:
    cells = [_cells(column.combine_chunks(), colour) for column in table.columns]
    joined: list[str] = pc.binary_join_element_wise("<row>", *cells, "</row>", "").to_pylist()
    return joined


def _cells(column: pa.Array, colour: pa.Array) -> pa.Array:
    """A column as cells: what looks like a number is one. Equal texts are made once."""
    encoded = column.dictionary_encode()
    distinct = encoded.dictionary
    number = pc.match_substring_regex(distinct, _NUMBER)
    safe = pc.utf8_slice_codeunits(distinct, 0, _LONGEST)
    for mark, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        safe = pc.replace_substring(safe, mark, entity)
    safe = pc.replace_substring_regex(safe, r"[\x00-\x08\x0b\x0c\x0e-\x1f]", "")
    kind = pc.if_else(number, ">", ' t="inlineStr">')
    body = pc.if_else(
        number,
        pc.binary_join_element_wise("<v>", safe, "</v>", ""),
        pc.binary_join_element_wise('<is><t xml:space="preserve">', safe, "</t></is>", ""),
    )
    tail = pc.binary_join_element_wise(kind, body, "</c>", "").take(encoded.indices)
    return pc.binary_join_element_wise("<c", colour, tail, "")
